"""Blocks that draw from Python's or numpy's generator, or from one of their own, draw the same
numbers when they run again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

DRAWS: dict[str, Callable[[Any], float]] = {
    "torch": lambda _: torch.rand(()).item(),
    "python": lambda _: random.random(),
    "numpy": lambda _: numpy.random.rand(),
    "own of torch": lambda own: torch.rand((), generator=own).item(),
    "own of python": lambda own: own.random(),
    "own of numpy": lambda own: own.random(),
    "own of numpy, as before": lambda own: own.standard_normal(),
    "of the system": lambda own: 0.5 + own.random() * 0,
}
OWN: dict[str, Callable[[], object]] = {
    "own of torch": lambda: torch.Generator().manual_seed(1),
    "own of python": lambda: random.Random(1),
    "own of numpy": lambda: numpy.random.default_rng(1),
    "own of numpy, as before": lambda: numpy.random.RandomState(1),
    "of the system": random.SystemRandom,
}


class Scaled(nn.Module):
    """A layer whose gradient depends on a number that its forward draws."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = DRAWS[name]
        self.linear.own = OWN[name]() if name in OWN else None
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, 16).view(4, 4))
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.draw(self.linear.own) if self.training else 1.0
        return x + torch.tanh(scale * self.linear(x))


class Slope(nn.Module):
    """The gradient of blocks, for which backward runs each of them more than once."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        x = x.detach().requires_grad_()
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        return torch.autograd.grad(hidden.sum(), x, create_graph=True)[0]


def as_they_are(blocks: nn.Sequential) -> nn.Module:
    return blocks


def norms(plan: str, name: str, form: Callable[[nn.Sequential], nn.Module]) -> list[float]:
    """The gradients' norms of three steps."""
    numpy.random.seed(0)
    model = form(nn.Sequential(*(Scaled(name) for _ in range(3)))).double()
    text = f"{plan} precision:float64"
    engine = plait.build(
        model, text, loss=F.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    batch = torch.linspace(-1, 2, 16).double().view(4, 4), torch.ones(4, 4).double()
    return [engine.step(batch, trace=False).grad_norm for _ in range(3)]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(
    ("remat", "form"),
    [("full", as_they_are), ("selective", as_they_are), ("full", Slope)],
    ids=["full", "selective", "more than once"],
)
def test_a_recomputed_block_draws_the_same_numbers(
    name: str, remat: str, form: Callable[[nn.Sequential], nn.Module]
) -> None:
    before = numpy.random.get_state()
    try:
        expected = norms("dp1", name, form)
        assert norms(f"dp1 remat:{remat}", name, form) == pytest.approx(expected, rel=1e-12)
    finally:
        numpy.random.set_state(before)
