"""Writes of the forwards of micro-batches, and by the first samples of a part, are told once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.warned import warnings_of_steps

Move = Callable[[nn.Parameter, nn.Parameter], None]
UNDONE = "updates masters apart"
MOVED = "moves the frozen parameters 'average.0.weight'"
SET = "sets the trained parameters 'first.scale'"
ITERATES = "the spectral norm of '0' iterates once in each forward"


def plainly(kept: nn.Parameter, param: nn.Parameter) -> None:
    kept.lerp_(param, 0.01)


def hidden(kept: nn.Parameter, param: nn.Parameter) -> None:
    kept.data.mul_(0.99).add_(0.01 * param.data)


def bounded(kept: nn.Parameter, param: nn.Parameter) -> None:
    """The same after a second write."""
    kept.data.clamp_(-0.1, 0.1)


class Followed(nn.Module):
    """A copy of an encoder, which follows it."""

    def __init__(self, move: Move) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.move = move
        self.base = nn.Sequential(nn.Linear(12, 7, bias=False))
        self.average = copy.deepcopy(self.base).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 12] -> [samples, 7]."""
        out: Tensor = self.base(x)
        with torch.no_grad():
            for kept, param in zip(self.average.parameters(), self.base.parameters(), strict=True):
                self.move(kept, param)
            aim: Tensor = self.average(x.flip(1))
        return out - aim


class Scaled(nn.Module):
    """A layer that sets its scale by the samples of its first forward, as ActNorm does."""

    def __init__(self, *, bounds: bool = False) -> None:
        super().__init__()
        self.bounds = bounds
        self.length = 0
        self.scale = nn.Parameter(torch.full((12,), 3.0))
        self.is_set: Tensor
        self.register_buffer("is_set", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 12] -> the same."""
        self.length = x.shape[1]  # a size that is noted is no flag
        if self.bounds:
            self.scale.data.clamp_(-1, 1)
        elif not self.is_set:
            self.scale.data.copy_(1 / x.detach().std(0, unbiased=False).add(0.1))
            self.is_set.fill_(1)
        return x * self.scale


class Layers(nn.Module):
    """A layer that sets itself, and a linear one."""

    def __init__(self, *, bounds: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Scaled(bounds=bounds)
        self.last = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 12] -> [samples, 7]."""
        out: Tensor = self.last(self.first(x))
        return out


def said(model: nn.Module, plan: str, ranks: int = 1) -> list[str]:
    """The warnings of three steps of 8 samples about writes of forwards."""
    texts = warnings_of_steps(model, plan, (12, 7), ranks)
    return [one for one in texts if "forward" in one and "buffers" not in one]


@pytest.mark.parametrize("plan", ["dp1 mb2", "dp2 mb2", "pp2 mb2", "tp2 mb2"])
@pytest.mark.parametrize("move", [plainly, hidden])
def test_a_network_that_moves_in_each_micro_batch_is_told_once(move: Move, plan: str) -> None:
    (text,) = said(Followed(move), plan, ranks=2 if "2 " in plan else 1)
    assert MOVED in text
    assert "runs it 2 times in a step" in text
    assert "write mb1" in text


def test_zero3_tells_of_writes_that_it_keeps() -> None:
    (text,) = said(Followed(plainly), "dp2:zero3 mb2", ranks=2)
    assert MOVED in text


@pytest.mark.parametrize("plan", ["dp1", "dp2", "dp2:zero3", "pp2 mb1"])
def test_one_forward_of_a_step_is_not_told(plan: str) -> None:
    assert said(Followed(plainly), plan, ranks=2 if "2" in plan else 1) == []


def test_a_bound_of_parameters_is_not_told() -> None:
    assert said(Followed(bounded), "dp1 mb2") == []
    assert said(Layers(bounds=True), "dp1 mb2") == []
    assert said(Layers(bounds=True), "dp2", ranks=2) == []


def test_a_frozen_parameter_that_is_no_number_has_not_moved() -> None:
    model = Layers()
    model.register_parameter("table", nn.Parameter(torch.tensor([torch.nan]), requires_grad=False))
    model(torch.randn(8, 12))
    assert said(model, "dp1 mb2") == []


@pytest.mark.parametrize("plan", ["dp1 mb2", "dp2", "dp2:zero1", "dp2:zero3", "dp2 mb2", "pp2 mb2"])
def test_a_parameter_that_the_first_samples_set_is_told_once(plan: str) -> None:
    (text,) = said(Layers(), plan, ranks=2 if "2" in plan.split(maxsplit=1)[0] else 1)
    assert SET in text
    assert "call the model once with a whole batch before plait.build" in text


def test_a_parameter_that_a_whole_batch_has_set_is_not_told() -> None:
    assert said(Layers(), "dp1") == []
    model = Layers()
    model(torch.randn(8, 12))
    assert said(model, "dp1 mb2") == []
    assert said(model, "dp2", ranks=2) == []


def iterated(*, by_hook: bool) -> nn.Module:
    norm = nn.utils.spectral_norm if by_hook else nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(12, 12)), nn.Linear(12, 7))


@pytest.mark.parametrize("by_hook", [False, True])
def test_a_spectral_norm_under_micro_batches_is_told_once(*, by_hook: bool) -> None:
    (text,) = said(iterated(by_hook=by_hook), "dp1 mb2")
    assert ITERATES in text
    assert "2 batches whose gradients are added on one device do the same" in text
    assert "n_power_iterations" in text
    assert len(said(iterated(by_hook=by_hook), "pp2 mb2", ranks=2)) == 1
    assert said(iterated(by_hook=by_hook), "dp2", ranks=2) == []


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero1", "dp2:zero3", "dp1 mb2"])
def test_a_bound_on_weights_that_masters_undo_is_told_once(plan: str) -> None:
    ranks = 2 if "dp2" in plan else 1
    texts = said(Layers(bounds=True), f"{plan} precision:bf16", ranks=ranks)
    (text,) = (one for one in texts if UNDONE in one)
    assert "'first.scale'" in text
    assert not [one for one in said(Layers(bounds=True), plan, ranks=ranks) if UNDONE in one]


def test_masters_alone_are_not_told() -> None:
    model = nn.Sequential(nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Linear(9, 7))
    assert not [one for one in said(model, "dp1 mb2 precision:bf16") if UNDONE in one]
