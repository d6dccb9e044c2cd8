"""Can `verify` fail? Every planted fault turns it red, and is called by its name and its axis."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from plait.plan import Plan
from plait.verify import Report
from plait.verify.run import VerifyTask, in_world, verify
from plait.verify.training import prove
from tests.parity import update_faults
from tests.parity.mutations import BY_NAME, MUTATIONS
from tests.parity.verify_problems import problem


def run_mutated(world: Any, task: VerifyTask, name: str) -> Report:
    with BY_NAME[name].planted():
        return in_world(world, task)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_planted_fault_is_found_and_named(ranks, name):
    mutation = BY_NAME[name]

    def runner(task: VerifyTask) -> Report:
        return ranks(Plan.parse(task.plan).world_size, run_mutated, task, name, plan=task.plan)[0]

    task = VerifyTask(
        problem(mutation.model), f"{mutation.plan} precision:float64", 3, None, (mutation.probe,)
    )
    report = verify(task, runner)
    text = report.text()
    assert not report.ok and not report.refusals, text
    causes = {finding.cause: finding for finding in report.all_findings}
    if mutation.cause:
        assert mutation.cause in causes, text
        assert mutation.axis in causes[mutation.cause].axis.split("+"), text
    assert tuple(causes["bisected"].axis.split("+")) == (mutation.blamed or ("",)), text


@pytest.mark.parametrize(
    ("plan", "planted"),
    [
        ("dp2", None),
        ("dp2 precision:bf16", None),
        ("dp2", "fused_update_decays_less"),
        ("dp2 precision:bf16", "masters_in_bf16"),
    ],
)
def test_the_update_of_training_is_proven(ranks, plan, planted):
    """Kernels that float64 does not take: with no fault equal, with a fault not."""
    report = ranks(2, run_training, plan, planted, plan=plan)[0]
    assert report.ok is (planted is None), report.text()


def run_training(world: Any, plan: str, planted: str | None) -> Report:
    with ExitStack() as stack:
        for one in getattr(update_faults, planted)() if planted else ():
            stack.enter_context(one)
        return prove(world, problem("even"), Plan.parse(plan), 2)


def test_there_are_enough_of_them():
    assert len(MUTATIONS) >= 20 and len(BY_NAME) == len(MUTATIONS)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_planted_fault_has_a_place(name):
    """A fault patches functions by name: a renamed one would plant nothing."""
    with BY_NAME[name].planted():
        pass
