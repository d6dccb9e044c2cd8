"""Tensors inside an object that blocks get, as a cache of keys, pass between stages too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import World
from plait.errors import ModelError
from tests.helpers.sgd import drawn_batch, sgd_engine, three_losses
from tests.helpers.threaded import threaded


class Prefixes:
    """What each block adds, kept as a cache keeps keys."""

    def __init__(self, layers: list[Tensor]) -> None:
        self.layers = layers


class Listed(list[Tensor]):
    """A list of one's own."""

    @property
    def layers(self) -> list[Tensor]:
        return [*self]


class Slotted:
    """The same without a dictionary."""

    __slots__ = ("layers",)

    def __init__(self, layers: list[Tensor]) -> None:
        self.layers = layers


class Bound:
    """The same behind a function."""

    def __init__(self, layers: list[Tensor]) -> None:
        self.get: Callable[[], list[Tensor]] = partial(list, layers)

    @property
    def layers(self) -> list[Tensor]:
        return self.get()


Kind = Callable[[list[Tensor]], Any]
KINDS: tuple[Kind, ...] = (Prefixes, Listed, Slotted, Bound)


class Adding(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(6, 6)

    def forward(self, x: Tensor, prefixes: Any) -> Tensor:
        return (self.linear(x) + prefixes.layers[self.index]).tanh()


class Prefixed(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.encoder = nn.Linear(6, 24)
        self.blocks = nn.ModuleList(Adding(index) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        prefixes = self.kind([*self.encoder(x).unflatten(-1, (6, 4)).unbind(-1)])
        for block in self.blocks:
            x = block(x, prefixes)
        return x


def model(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    return Prefixed(kind).double()


def losses(world: World, models: list[nn.Module], plan: str) -> list[float]:
    engine = sgd_engine(world, models[world.rank], plan, F.mse_loss, 0.5)
    return three_losses(engine, drawn_batch(4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["pp2 mb1", "pp2:1f1b mb2"])
def test_they_reach_later_stages_with_their_gradients(plan: str, kind: Kind) -> None:
    alone = threaded(1, losses, [model(kind)], "dp1", plan="dp1")[0]
    found = threaded(2, losses, [model(kind), model(kind)], plan, plan=plan)[0]
    assert found == pytest.approx(alone, rel=1e-12)


class Returning(nn.Module):
    """A block that returns an object with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Slotted) -> Slotted:
        return Slotted([self.linear(x.layers[0]).tanh()])


class Handed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returning() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        handed = Slotted([x])
        for block in self.blocks:
            handed = block(handed)
        return handed.layers[0]


def test_an_object_that_a_block_returns_to_a_later_stage_is_refused() -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [Handed().double() for _ in range(2)]
    with pytest.raises(ModelError, match=r"'blocks\.1' returns an object with tensors"):
        threaded(2, losses, models, "pp2:1f1b mb2", plan="pp2:1f1b mb2")


@pytest.mark.parametrize("plan", ["dp2:zero3", "dp2:zero3 mb2", "dp2:zero3 remat:full"])
def test_zero3_has_the_weights_of_blocks_that_return_objects_in_backward(plan: str) -> None:
    torch.manual_seed(0)
    model = Handed().double()
    models: list[nn.Module] = [copy.deepcopy(model) for _ in range(3)]
    alone = threaded(1, losses, models[:1], "dp1", plan="dp1")[0]
    found = threaded(2, losses, models[1:], plan, plan=plan)[0]
    assert found == pytest.approx(alone, rel=1e-12)
