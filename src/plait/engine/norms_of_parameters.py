"""Norms of parameters, which tell that a forward has written into them where `.data` hides it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def norms_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norms (0-dim, float64) of those tensors [...] that hold floating-point numbers."""
    floating = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel()
    }
    if not floating:
        return {}
    norms = torch._foreach_norm(list(floating.values()), dtype=torch.float64)
    return dict(zip(floating, norms, strict=True))


def changed(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> set[str]:
    """The names whose norm (0-dim) is another. One that is no number stays the same."""
    return {
        name
        for name in before.keys() & now.keys()
        if not torch.allclose(before[name], now[name], rtol=0.0, atol=0.0, equal_nan=True)
    }
