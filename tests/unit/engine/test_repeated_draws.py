"""Blocks that draw from Python's or numpy's generator draw the same numbers when they run again."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "python": random.random,
    "numpy": numpy.random.rand,
}


class Scaled(nn.Module):
    """A layer whose gradient depends on a number that its forward draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = draw
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, 16).view(4, 4))
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.draw() if self.training else 1.0
        return x + torch.tanh(scale * self.linear(x))


def norms(plan: str, name: str) -> list[float]:
    """The gradients' norms of three steps."""
    numpy.random.seed(0)
    model = nn.Sequential(*(Scaled(DRAWS[name]) for _ in range(3))).double()
    text = f"{plan} precision:float64"
    engine = plait.build(
        model, text, loss=F.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    batch = torch.linspace(-1, 2, 16).double().view(4, 4), torch.ones(4, 4).double()
    return [engine.step(batch, trace=False).grad_norm for _ in range(3)]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("remat", ["full", "selective"])
def test_a_recomputed_block_draws_the_same_numbers(name: str, remat: str) -> None:
    before = numpy.random.get_state()
    try:
        expected = norms("dp1", name)
        assert norms(f"dp1 remat:{remat}", name) == pytest.approx(expected, rel=1e-12)
    finally:
        numpy.random.set_state(before)
