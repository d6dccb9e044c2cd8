"""A model of the user's own: `python = "module:function"`, a function that returns an
`nn.Module`.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from plait.errors import ModelError, PlaitError
from plait.reference import load
from plait.values import JsonMapping


def make(python: str, arguments: JsonMapping | None = None) -> nn.Module:
    """Call the function with `arguments` on the current default device.

    Its module is imported on the host: tensors that the module makes keep their values. A failure
    inside the function becomes a `ModelError` that names it.
    """
    with torch.device("cpu"):
        function = load(python, ModelError)
    try:
        model = function(**(arguments or {}))
    except PlaitError:
        raise
    except Exception as failure:
        raise ModelError(
            f"python = {python!r} failed: {type(failure).__name__}: {failure}"
        ) from failure
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"python = {python!r} returned a {type(model).__name__}, not a torch.nn.Module"
        )
    return model


def initialises_by_name(python: str) -> bool:
    """Whether the module of the function says `INITIALISE_BY_NAME = True`.

    Its models are then made on the meta device. Every module is initialised by its
    `reset_parameters` from the seed of its name, so no rank holds the whole model.
    """
    return bool(getattr(inspect.getmodule(load(python, ModelError)), "INITIALISE_BY_NAME", False))
