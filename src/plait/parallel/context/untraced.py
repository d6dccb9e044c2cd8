"""Blocks that a model calls without autograd, as inside a function with a backward of its own.

Such a backward returns gradients of whole sequences. The blocks have seen parts of them only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from plait.errors import ModelError


@contextmanager
def calls_with_autograd(model: nn.Module, names: Iterable[str]) -> Iterator[set[str]]:
    """The names of modules that were called with gradients on; the set grows during the calls."""
    traced: set[str] = set()

    def note(name: str) -> None:
        if torch.is_grad_enabled():
            traced.add(name)

    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: note(name))
        for name in names
    ]
    try:
        yield traced
    finally:
        for handle in handles:
            handle.remove()


def refuse_untraced(model: nn.Module, names: Sequence[str], size: int) -> None:
    """Raise `ModelError` for the first of these modules that has trainable parameters.

    Args:
        model: whose modules they are.
        names: of modules that were never called where gradients are recorded.
        size: the number of cp ranks.
    """
    for name in names:
        params = model.get_submodule(name).named_parameters()
        trainable = next((key for key, param in params if param.requires_grad), None)
        if trainable is not None:
            raise ModelError(
                f"'{name}' is called without autograd although '{trainable}' is trained, as inside "
                f"an autograd.Function or torch.no_grad(); cp{size} cuts sequences at its door, "
                "and a backward of the model's own knows no parts: write the model without it, or "
                "train it without cp"
            )
