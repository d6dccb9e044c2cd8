"""A layer that its owner gave another forward is not cut as the layer of its class."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import build
from plait.forwards import runs_forward_of
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]


class Calling(nn.Linear):
    """A linear layer whose class has a call of its own."""

    def __call__(self, x: Tensor) -> Tensor:
        """[samples, in] -> [samples, out]."""
        made: Tensor = super().__call__(x).sin()
        return made


class Block(nn.Module):
    """Two layers, the first of which does more than a linear layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up = Calling(8, 16) if kind == "call" else nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        if kind == "forward":
            own = self.up.forward
            self.up.forward = lambda x: own(x).sin()  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 8] -> the same."""
        made: Tensor = x + self.down(self.up(x).relu())
        return made


def model(kind: str) -> nn.Sequential:
    made = nn.Sequential(Block(kind), Block(kind)).double()
    generator = torch.Generator().manual_seed(2)
    for param in made.parameters():
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)
    return made


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    return inputs, inputs.flip(0)


def losses(world: World, kind: str, plan: str) -> list[float]:
    warnings.filterwarnings("ignore", ".* no layer")  # such a model may have none to cut
    engine = build(
        model(kind),
        f"{plan} precision:float64",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        world=world,
    )
    return [engine.step(batch()).loss for _ in range(3)]


def plain(kind: str) -> list[float]:
    found = model(kind)
    optimizer = torch.optim.SGD(found.parameters(), lr=0.01)
    inputs, targets = batch()
    numbers = []
    for _ in range(3):
        loss = F.mse_loss(found(inputs), targets)
        numbers.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return numbers


@pytest.mark.parametrize("plan", ["tp2", "tp2:1d,sp"])
@pytest.mark.parametrize("kind", ["plain", "call", "forward"])
def test_equals_one_device(ranks: Run, kind: str, plan: str) -> None:
    for found in ranks(2, losses, kind, plan, plan=plan):
        assert found == pytest.approx(plain(kind), rel=TOLERANCE, abs=0)


def test_a_forward_that_plait_gave_is_that_of_the_class() -> None:
    layer = nn.Linear(2, 2)
    assert runs_forward_of(layer, nn.Linear) and not runs_forward_of(layer, nn.Embedding)
    assert not runs_forward_of(Calling(2, 2), nn.Linear)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    assert not runs_forward_of(layer, nn.Linear)
