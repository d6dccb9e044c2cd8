"""A layer that its owner gave another forward is not cut as the layer of its class."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from plait.comm import World
from plait.forwards import runs_forward_of
from tests.parity.few_steps import batch, drawn, losses, plain
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]
WIDTH = 8


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
        self.up = Calling(WIDTH, 16) if kind == "call" else nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        if kind == "forward":
            own = self.up.forward
            self.up.forward = lambda x: own(x).sin()  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 8] -> the same."""
        made: Tensor = x + self.down(self.up(x).relu())
        return made


def model(kind: str) -> nn.Module:
    return drawn(nn.Sequential(Block(kind), Block(kind)))


def under_plan(world: World, kind: str, plan: str) -> list[float]:
    warnings.filterwarnings("ignore", ".* no layer")  # such a model may have none to cut
    return losses(world, model(kind), plan, batch(WIDTH))


@pytest.mark.parametrize("plan", ["tp2", "tp2:1d,sp"])
@pytest.mark.parametrize("kind", ["plain", "call", "forward"])
def test_equals_one_device(ranks: Run, kind: str, plan: str) -> None:
    expected = plain(model(kind), batch(WIDTH))
    for found in ranks(2, under_plan, kind, plan, plan=plan):
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=0)


def test_a_forward_that_plait_gave_is_that_of_the_class() -> None:
    layer = nn.Linear(2, 2)
    assert runs_forward_of(layer, nn.Linear) and not runs_forward_of(layer, nn.Embedding)
    assert not runs_forward_of(Calling(2, 2), nn.Linear)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    assert not runs_forward_of(layer, nn.Linear)
