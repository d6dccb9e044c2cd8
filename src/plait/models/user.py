"""A model of the user's own: `python = "module:function"`, a function without parameters that returns an `nn.Module`."""

from __future__ import annotations

from torch import nn

from plait.errors import ModelError, PlaitError
from plait.reference import load


def make(python: str) -> nn.Module:
    """Call the function on the current default device; a failure inside it becomes a `ModelError` that names it."""
    function = load(python, ModelError)
    try:
        model = function()
    except PlaitError:
        raise
    except Exception as failure:
        raise ModelError(f"python = {python!r} failed: {type(failure).__name__}: {failure}") from failure
    if not isinstance(model, nn.Module):
        raise ModelError(f"python = {python!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model
