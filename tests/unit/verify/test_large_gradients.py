"""A loss of large gradients, as a sum over pixels, is proved as any other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.verify.run import run


class Exponents(nn.Module):
    """Its output grows by the exponent of a layer's, as a variance from its logarithm does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.outer = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).tanh()).exp()


def exponents() -> nn.Module:
    return Exponents()


def pictures() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(16, generator=draw), torch.full((64,), 500.0)) for _ in range(24)]


def summed_over_pixels(found: Tensor, target: Tensor) -> Tensor:
    return (found - target).square().sum(1).mean()


def test_a_sum_over_pixels_is_proved() -> None:
    report = run(
        {
            "model": {"python": f"{__name__}:exponents"},
            "data": {"python": f"{__name__}:pictures"},
            "train": {"loss": f"{__name__}:summed_over_pixels", "global_batch": 8},
        },
        "dp2",
        probes=("sgd", "accumulation"),
    )
    assert report.ok, report
