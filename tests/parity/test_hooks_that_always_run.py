"""Hooks that always run undo what hooks before a forward did, also where plait leaves it early."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import Options
from tests.helpers.threaded import threaded
from tests.parity.few_steps import batch, drawn, losses, plain
from tests.parity.harness import TOLERANCE

WIDTH = 6


def enter(module: Any, args: tuple[Tensor, ...]) -> None:
    module.depth += 1


def leave(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
    module.depth -= 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_forward_pre_hook(enter)
        self.register_forward_hook(leave, always_call=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.depth * self.inner(x).tanh()


class Block(nn.Module):
    """A block whose last saved operation stands inside of the layer with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Body(nn.Module):
    """Layers of several stages, with hooks around all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.register_forward_pre_hook(enter)
        self.register_forward_hook(leave, always_call=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x.square()
        return self.depth * x


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.body(x))
        return hidden


@pytest.mark.parametrize(
    "plan",
    ["dp1 remat:full", "dp1 remat:selective", "dp2:zero3 remat:full", "pp2:1f1b mb2"],
)
def test_training_equals_one_device(plan: str) -> None:
    model, pair = drawn(Hooked()), batch(WIDTH)
    expected = plain(copy.deepcopy(model), pair)
    options = Options(blocks="body.layers.*")

    def trained(world: World) -> list[float]:
        return losses(world, copy.deepcopy(model), plan, pair, options=options)

    for found in threaded(1 if "dp1" in plan else 2, trained, plan=plan):
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=0)
