"""An optimizer that keeps more than its state is told of when a checkpoint is saved."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.config import Train
from plait.run.optimizers import Muon


class SlowWeights(torch.optim.SGD):
    """Lookahead (Zhang et al. 2019), whose slow weights are in an attribute."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.slow = [one.detach().clone() for one in self.param_groups[0]["params"]]


class AroundAnother(torch.optim.Optimizer):
    """A wrapper with a state of its own, as `Lookahead` of well-known packages."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.state = defaultdict(dict)
        self.inner = inner

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure here
        """One step of the other optimizer."""
        self.inner.step()


class Several(AroundAnother):
    """A wrapper that holds others in a list."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.parts = [self.__dict__.pop("inner")]

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure here
        """One step of each."""
        for part in self.parts:
            part.step()


class WithTable(torch.optim.AdamW):
    """An optimizer with a constant of the shape of one of its parameters."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params)
        self.table = torch.ones(3)


class WithViews(torch.optim.SGD):
    """An optimizer that keeps its parameters without their graph, and itself."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.detached = [one.detach() for one in self.param_groups[0]["params"]]
        self.owner = self


class InParts(torch.optim.Optimizer):
    """Two optimizers of a half of the parameters each, whose states are seen as one."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        first, *others = params
        self.parts = [torch.optim.AdamW([first]), torch.optim.AdamW(others)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure here
        """One step of each."""
        for part in self.parts:
            part.step()
            self.state.update(part.state)


class Counting(torch.optim.SGD):
    """Keeps a count beside the state of parameters, as MADGRAD does."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.state["k"] = torch.zeros(1)  # type: ignore[index]  # no parameter's


class WarmedUp(torch.optim.SGD):
    """Counts its steps in an attribute, as StableSPAM does, and warms up by them."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.total_step = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure here
        """One step with a rate of its number."""
        self.total_step += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * min(1.0, self.total_step / 10)
        super().step()


class Computing(torch.optim.SGD):
    """Has numbers in attributes that each step computes again."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.rate, self.limit, self.is_first = 0.0, 10, True

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure here
        """One step with a rate that its group's count says."""
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        self.rate = min(group["step"], self.limit) / 10
        group["lr"] = 0.1 * self.rate
        if self.is_first:
            self.is_first = False
        super().step()


class WithWhole(torch.optim.SGD):
    """Keeps the state of a whole matrix, of which its groups have parts, as Muon does."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.state[nn.Parameter(torch.zeros(2, 7))] = {"momentum": torch.zeros(2, 7)}


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


TOLD: dict[str, tuple[Callable[..., Any], str]] = {
    "slow weights": (SlowWeights, "2 tensors of its parameters' shapes in its attribute 'slow'"),
    "another": (lambda params: AroundAnother(_adamw(params)), "a AdamW in its attribute 'inner'"),
    "several": (lambda params: Several(_adamw(params)), "a AdamW in its attribute 'parts'"),
    "a count": (Counting, "'k' in its state, which is no parameter's"),
    "a count of steps": (WarmedUp, "a count in its attribute 'total_step'"),
    "a count in whole tensors": (plait.WholeTensors(WarmedUp), "in its attribute 'total_step'"),
    "an average of slow weights": (plait.AveragedWeights(SlowWeights), "attribute 'slow'"),
}
SILENT: dict[str, Callable[..., Any]] = {
    "adamw": _adamw,
    "a table": WithTable,
    "views of parameters, and itself": WithViews,
    "parts whose state it has": InParts,
    "a whole matrix": WithWhole,
    "numbers computed again": Computing,
    "muon": lambda params: Muon(params, Train()),
    "an average": plait.AveragedWeights(_adamw),
    "whole tensors": plait.WholeTensors(_adamw),
}


@pytest.mark.parametrize("kind", TOLD)
def test_what_a_checkpoint_leaves_out_is_told(kind: str, tmp_path: Path) -> None:
    make, words = TOLD[kind]
    engine = _trained(make)
    with pytest.warns(UserWarning, match=words):
        engine.save(tmp_path / "checkpoint")


@pytest.mark.parametrize("kind", SILENT)
def test_an_optimizer_that_keeps_all_in_its_state_is_not_told_of(kind: str, tmp_path: Path) -> None:
    engine = _trained(SILENT[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.save(tmp_path / "checkpoint")


def _trained(make: Callable[..., Any]) -> plait.Engine:
    torch.manual_seed(0)
    engine = plait.build(nn.Linear(5, 3), "dp1", loss=nn.MSELoss(), optimizer=make)
    engine.step((torch.randn(4, 5), torch.randn(4, 3)))
    return engine
