"""`verify` on a module that knows nothing of this project: no false alarm, no crash."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config import load
from plait.plan import Plan
from plait.verify import Report
from plait.verify.run import VerifyTask, in_world, problem_of
from tests.parity.strangers import config


def run_task(world: Any, task: VerifyTask) -> Report:
    return in_world(world, task)


@pytest.mark.parametrize("plan", ["dp2:zero3", "tp2", "pp2:1f1b mb2", "cp2:ring", "cp2:ulysses"])
def test_a_mean_over_sequences_in_mappings_passes(ranks: Any, plan: str) -> None:
    """A loss of one number counts samples, whatever the number of their tokens, and each sample
    once where ranks have parts of it.
    """
    probes = ("sgd", "adamw", "accumulation")
    text = f"{plan} precision:float64"
    task = VerifyTask(problem_of(load(config())), text, 2, None, probes, training="float32")
    report = ranks(2, run_task, task, plan=plan)[0]
    assert report.ok, report.text()
    assert {part.title for part in report.parts} == {*probes, "training-float32"}


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        *[("Scanner", plan) for plan in ("cp2:ring", "cp2:ulysses", "tp2", "dp2")],
        *[("Turns", plan) for plan in ("tp2", "pp2:1f1b mb2")],
    ],
)
def test_scans_objects_and_turns_pass(ranks: Any, kind: str, plan: str) -> None:
    """A residual stream outside the blocks sees whole sequences; outputs may be objects or 0-dim;
    a layer that reads what a rank has a part of is no column.
    """
    problem = problem_of(load(config(kind)))
    task = VerifyTask(problem, f"{plan} precision:float64", 2, None, ("sgd",))
    report = ranks(2, run_task, task, plan=plan)[0]
    assert report.ok, report.text()


@pytest.mark.parametrize("plan", ["dp2:zero3 mb2", "tp2", "pp2:1f1b mb2"])
def test_clamped_gradients_pass(ranks: Any, plan: str) -> None:
    """A clamp is not linear, so that one device must begin with the mean as well."""
    task = VerifyTask(
        problem_of(load(config("Clamped"))), f"{plan} precision:float64", 2, None, ("sgd",)
    )
    report = ranks(2, run_task, task, plan=plan)[0]
    assert report.ok, report.text()


@pytest.mark.parametrize("plan", ["dp2:zero3", "dp2 mb2", "pp2:1f1b dp2 mb2"])
def test_synchronised_batch_norms_pass(ranks: Any, plan: str) -> None:
    probes = ("sgd", "adamw", "accumulation", "last-batch")
    task = VerifyTask(
        problem_of(load(config("Synced"))), f"{plan} precision:float64", 3, None, probes
    )
    report = ranks(Plan.parse(plan).world_size, run_task, task, plan=plan)[0]
    assert report.ok, report.text()
    assert {part.title for part in report.parts} == set(probes)


def test_a_failure_on_one_device_is_told_by_every_rank(ranks: Any) -> None:
    problem = problem_of(load(config("Nothing")))
    task = VerifyTask(problem, "dp2 precision:float64", 2, None, ("sgd",))
    with pytest.raises(Exception, match="a Hidden, in which no tensor is found"):
        ranks(2, run_task, task, plan="dp2")
