"""Forwards that catch exceptions: recomputation and pipelines leave a forward by exceptions too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import Options
from tests.helpers.threaded import threaded
from tests.parity.few_steps import batch, drawn, losses, plain
from tests.parity.harness import TOLERANCE

WIDTH = 6
Inner = Callable[[Tensor], Tensor]


def wrapping(inner: Inner, x: Tensor) -> Tensor:
    try:
        return inner(x)
    except Exception as error:
        raise RuntimeError("this layer has failed") from error


def hiding(inner: Inner, x: Tensor) -> Tensor:
    try:
        return inner(x)
    except Exception:
        raise RuntimeError("this layer has failed") from None


def falling_back(inner: Inner, x: Tensor) -> Tensor:
    try:
        return inner(x)
    except Exception:
        return torch.sin(x).exp()


def trying_first(inner: Inner, x: Tensor) -> Tensor:
    with suppress(Exception):
        return inner(x)
    return torch.sin(x).exp()


def catching_all(inner: Inner, x: Tensor) -> Tensor:
    try:
        return inner(x)
    except:  # noqa: E722
        return torch.sin(x).exp()


def replacing_all(inner: Inner, x: Tensor) -> Tensor:
    try:
        return inner(x)
    except BaseException as error:
        raise RuntimeError("this layer has failed") from error


CATCHING = [wrapping, hiding, falling_back, trying_first]
Catching = Callable[[Inner, Tensor], Tensor]


class Block(nn.Module):
    """A block whose last saved operation stands inside of what it catches."""

    def __init__(self, catching: Catching) -> None:
        super().__init__()
        self.catching = catching
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.catching(lambda y: torch.tanh(self.inner(y)), x)


class Catches(nn.Module):
    """Blocks, whose calls the model catches too."""

    def __init__(self, catching: Catching, *, in_blocks: bool) -> None:
        super().__init__()
        self.catching = catching
        kept = Block(catching if in_blocks else lambda inner, x: inner(x))
        self.layers = nn.ModuleList(copy.deepcopy(kept) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.in_blocks = in_blocks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.in_blocks else self.catching(layer, x)
        return self.head(x)


def check(model: nn.Module, plan: str, num_ranks: int) -> None:
    model, pair = drawn(model), batch(WIDTH)
    expected = plain(copy.deepcopy(model), pair)

    def trained(world: World) -> list[float]:
        options = Options(blocks="layers.*")
        return losses(world, copy.deepcopy(model), plan, pair, options=options)

    for found in threaded(num_ranks, trained, plan=plan):
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=0)


@pytest.mark.parametrize("catching", CATCHING)
@pytest.mark.parametrize(
    "plan", ["dp1 remat:full", "dp1 remat:selective", "pp2:1f1b mb2 remat:full"]
)
def test_recomputation_equals_one_device(catching: Catching, plan: str) -> None:
    check(Catches(catching, in_blocks=True), plan, 1 if plan.startswith("dp1") else 2)


@pytest.mark.parametrize("catching", [*CATCHING, catching_all, replacing_all])
def test_a_pipeline_equals_one_device(catching: Catching) -> None:
    check(Catches(catching, in_blocks=False), "pp2:1f1b mb2", 2)


def test_an_error_of_a_recomputed_block_stays_its_own() -> None:
    def failing(inner: Inner, x: Tensor) -> Tensor:
        raise ZeroDivisionError("of the model")

    model, pair = drawn(Catches(failing, in_blocks=True)), batch(WIDTH)

    def trained(world: World) -> list[float]:
        return losses(world, model, "dp1 remat:full", pair, options=Options(blocks="layers.*"))

    with pytest.raises(ZeroDivisionError, match="of the model"):
        threaded(1, trained, plan="dp1 remat:full")
