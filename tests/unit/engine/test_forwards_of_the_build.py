"""What a forward writes into parameters is put back where `build` runs it on an example."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.parallel.pipeline import profile
from tests.helpers.threaded import threaded

Move = Callable[[nn.Parameter, nn.Parameter], None]


def hidden(kept: nn.Parameter, param: nn.Parameter) -> None:
    kept.data.mul_(0.9).add_(0.1 * param.data)


def plainly(kept: nn.Parameter, param: nn.Parameter) -> None:
    kept.lerp_(param, 0.1)


def anew(kept: nn.Parameter, param: nn.Parameter) -> None:
    kept.data = kept.data * 0.9 + param.data * 0.1
    kept.data.mul_(0.9)


class Followed(nn.Module):
    """An encoder that follows another one, from which it is far at the start."""

    def __init__(self, move: Move) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.move = move
        self.base = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 7))
        self.average = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 7))
        self.average.requires_grad_(False)

    @torch.no_grad()
    def aim(self, x: Tensor) -> Tensor:
        for kept, param in zip(self.average.parameters(), self.base.parameters(), strict=True):
            self.move(kept, param)
        aim: Tensor = self.average(x.flip(1))
        return aim

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out - self.aim(x)


class Scaled(nn.Module):
    """A layer that sets its scale by the samples of its first forward, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 12] -> the same."""
        if not self.is_set:
            self.scale.data.copy_(1 / x.detach().std(0, unbiased=False).add(0.1))
            self.is_set = True
        return x * self.scale


class Layers(nn.Module):
    """Layers of their own sizes, which are no chain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Scaled()
        self.second = nn.Linear(12, 12)
        self.third = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 12] -> [samples, 7]."""
        out: Tensor = self.third(self.second(self.first(x)).relu())
        return out


def losses(world: World, whole: nn.Module, plan: str, measure: bool = False) -> list[float]:
    draw = torch.Generator().manual_seed(5)
    batches = [(torch.randn(8, 12, generator=draw), torch.zeros(8, 7)) for _ in range(3)]
    engine = plait.build(
        copy.deepcopy(whole),
        plan,
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        options=plait.Options(cutting=plait.Cutting(measure=measure)),
        world=world,
    )
    return [engine.step(batch).loss for batch in engine.prepare(batches)]


@pytest.fixture(autouse=True)
def layers_measured_as_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured layers run, and each counts as a second, so that the cut is always the same."""
    measured = profile._LayerCall.seconds

    def seconds(layer: profile._LayerCall) -> float:
        assert measured(layer) > 0
        return 1.0

    monkeypatch.setattr(profile._LayerCall, "seconds", seconds)


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("move", [hidden, plainly, anew])
def test_a_pipeline_is_cut_before_a_network_moves(move: Move, *, measure: bool) -> None:
    whole = Followed(move)
    (expected,) = threaded(1, losses, whole, "dp1", plan="dp1")
    for found in threaded(2, losses, whole, "pp2 mb1", measure, plan="pp2 mb1"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("measure", [False, True])
def test_a_pipeline_is_cut_before_a_layer_sets_itself(*, measure: bool) -> None:
    whole = Layers()
    (expected,) = threaded(1, losses, whole, "dp1", plan="dp1")
    for found in threaded(2, losses, whole, "pp2 mb1", measure, plan="pp2 mb1"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("plan", ["tp2", "dp2:zero3"])
def test_other_plans_begin_as_one_device_does(plan: str) -> None:
    whole = Followed(plainly)
    (expected,) = threaded(1, losses, whole, "dp1", plan="dp1")
    for found in threaded(2, losses, whole, plan, plan=plan):
        assert found == pytest.approx(expected, rel=1e-5)
