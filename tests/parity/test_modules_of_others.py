"""Modules as others write them pass `verify` under every plan that means something for them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from plait.config import load
from plait.plan import Plan
from plait.verify import Report
from plait.verify.run import VerifyTask, in_world, problem_of
from tests.parity import modules_of_others as others

CASES = [
    *[(others.Lambda, plan) for plan in ("dp2:zero3", "tp2", "pp2:1f1b mb2")],
    *[(others.Recurrent, plan) for plan in ("dp2", "tp2", "pp2:1f1b mb2")],
    *[(others.Unblocked, plan) for plan in ("pp2:1f1b mb2", "pp2 tp2 mb2", "pp2 dp2:zero3 mb2")],
    *[(others.Rotary, plan) for plan in ("dp2:zero3", "tp2", "pp2:1f1b mb2", "cp2:ring")],
    *[(others.Tied, plan) for plan in ("dp2", "tp2", "tp4:2d")],
    *[(others.Dropping, plan) for plan in ("dp2", "tp2", "pp2:1f1b mb2")],
    *[(others.Plain, plan) for plan in ("tp2", "tp4:2d", "pp2:1f1b tp2 mb2")],
    *[(others.Skipping, plan) for plan in ("dp2", "tp2")],
    *[(others.Frozen, plan) for plan in ("dp2", "tp2", "tp4:2d")],
]


def run_task(world: Any, task: VerifyTask) -> Report:
    return in_world(world, task)


@pytest.mark.parametrize(("kind", "plan"), CASES)
def test_equals_one_device(ranks: Any, kind: type[nn.Module], plan: str) -> None:
    task = VerifyTask(
        problem_of(load(others.config(kind))), f"{plan} precision:float64", 2, None, ("sgd",)
    )
    report = ranks(Plan.parse(plan).world_size, run_task, task, plan=plan)[0]
    assert report.ok, report.text()


def test_draws_for_samples_are_refused_where_ranks_have_others(ranks: Any) -> None:
    problem = problem_of(load(others.config(others.Dropping)))
    task = VerifyTask(problem, "tp4:2d precision:float64", 2, None, ("sgd",))
    with pytest.raises(Exception, match="the forward of Dropping draws random numbers"):
        ranks(4, run_task, task, plan="tp4:2d")
