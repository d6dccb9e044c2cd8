"""Optimizers with two sets of weights: one for steps, one for evaluations and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import nn
from torch.nn import functional as F

from plait.engine.build import build
from plait.engine.weight_modes import check_modes
from plait.errors import OptimizerError
from plait.models import losses
from plait.plan import Plan
from tests.helpers.rows import long_but
from tests.parity.harness import whole_model
from tests.parity.two_sets import AFTER, EVEN, PLANS, equals_one_device, goes_on

Run = Callable[..., list[Any]]


def schedule_free(params: Iterable[nn.Parameter]) -> Any:
    # An eps above rounding: gradients of key biases are zero but for the order of sums.
    return schedulefree.AdamWScheduleFree(
        params, lr=0.02, betas=(0.8, 0.99), eps=1e-5, weight_decay=0.1, warmup_steps=3
    )


def plainly() -> tuple[list[float], nn.Module]:
    model = whole_model(EVEN)
    optimizer = schedule_free(model.parameters())
    told: list[float] = []
    for inputs, targets in EVEN.batches(8):
        optimizer.train()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            outputs = model(inputs)
        evaluated = F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        told += [loss.item(), evaluated.item()]
    return told, model


@pytest.mark.parametrize("plan", PLANS)
def test_both_sets_of_weights_equal_one_device(ranks: Run, plan: str) -> None:
    equals_one_device(ranks, plan, schedule_free, plainly)


@pytest.mark.parametrize("after", long_but(["dp2:zero3"], AFTER))
def test_a_checkpoint_goes_on_under_another_plan(ranks: Run, tmp_path: Path, after: str) -> None:
    goes_on(ranks, tmp_path / "saved", after, schedule_free, plainly)


APART = ["dp2:local,every8", "dp2:async-server,stale2", "pp2:pipedream mb4"]


@pytest.mark.parametrize("plan", APART)
def test_ranks_that_do_not_step_together_refuse_it(plan: str) -> None:
    optimizer = schedule_free([nn.Parameter(torch.zeros(2))])
    with pytest.raises(OptimizerError, match=r"AdamWScheduleFree has train.*weights of all ranks"):
        check_modes(optimizer, Plan.parse(plan))


class WithoutNote(torch.optim.SGD):
    """An optimizer whose groups do not say which weights are in place."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize("plan", ["dp1", "dp1:zero1"])
def test_the_groups_of_an_optimizer_say_its_mode(plan: str) -> None:
    def silent(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return WithoutNote(params, lr=0.1)

    with pytest.raises(OptimizerError, match="no number in its param_groups says"):
        build(EVEN.model(), plan, loss=losses.cross_entropy, optimizer=silent)
