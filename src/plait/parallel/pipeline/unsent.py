"""Zeros in the place of results that an earlier stage did not send, as the example needed none.

A forward may choose what it combines, such as a block that is left out at random. Then it may need
such a result after all, and would compute with the zeros. A gradient that comes to them shows it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.parallel.pipeline.payload import TensorForm


def zeros_for(name: str, form: TensorForm, device: torch.device, *, has_backward: bool) -> Tensor:
    """Zeros [...] for a result of the module `name`, in one number's memory.

    A backward that brings them a gradient raises `ModelError`.
    """
    zero = torch.zeros((), dtype=form.dtype, device=device)
    if has_backward and form.requires_grad:
        zero.requires_grad_().register_hook(partial(_refuse, name))
    return zero.expand(form.shape)


def _refuse(name: str, grad: Tensor) -> None:
    """A gradient [...] has come to such zeros."""
    raise ModelError(
        f"this batch needs the result of '{name}' on a later stage, and the example did not, so "
        "that stage has zeros in its place; a pipeline needs a forward that combines the results "
        "of its modules in the same way for every batch: multiply a result that is left out by 0, "
        "as in x + keep * layer(x), or write the choice into the forward of the module itself"
    )
