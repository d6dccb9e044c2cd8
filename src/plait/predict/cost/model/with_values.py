"""Values where the meta device has none. Some modules' forwards depend on them, as routers do that
count their tokens.

Weights and inputs are noise, which spreads tokens over experts as a fresh router does. The counts
(which operators, over how many rows) then follow. Little is made real: a few hundred tokens, and of
a large weight one number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.stateless import replaced

if TYPE_CHECKING:
    from torch import nn

MOST_TOKENS = 512
FEWEST_TOKENS = 16
"""Tokens of a run with real values; every count is for each token."""
MOST_FLOPS = 4e10
"""Flops of a run with real values, which takes fewer tokens then, and none where the fewest are too
many.
"""
LARGE = 4_000_000
"""Numbers of a weight from which on it is one number seen many times."""
SCALE = 0.02


def tokens_for(module: nn.Module) -> int:
    """How many tokens a run with values may take; 0: none."""
    numbers = max(1, sum(param.numel() for param in module.parameters()))
    few = int(MOST_FLOPS / (2.0 * numbers))
    return min(MOST_TOKENS, max(few, FEWEST_TOKENS)) if 10 * few >= FEWEST_TOKENS else 0


def state_of(module: nn.Module, *, real: bool) -> dict[str, Any]:
    """Weights and buffers by name: on the meta device, or with values, those that it has or
    noise.
    """
    return replaced(
        module, lambda tensor: value_of(tensor, weight=True) if real else tensor.to("meta")
    )


def value_of(x: object, *, weight: bool = False) -> Any:
    """A meta tensor with values: noise, ones for a weight of one dim (a norm's), zeros for indices.
    Anything else stays unchanged.
    """
    import torch

    if not isinstance(x, torch.Tensor) or not x.is_meta:
        return x
    if not x.is_floating_point():
        tensor = torch.zeros(x.shape, dtype=x.dtype, device="cpu")
    elif weight and x.numel() > LARGE:
        return (
            torch.full((), SCALE, dtype=x.dtype, device="cpu")
            .expand(x.shape)
            .requires_grad_(x.requires_grad)
        )
    elif weight and x.dim() < 2:
        tensor = torch.ones(x.shape, dtype=x.dtype, device="cpu")
    else:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), device="cpu")
        tensor = noise.mul_(SCALE if weight else 1.0).to(x.dtype)
    return tensor.requires_grad_(x.requires_grad)
