from __future__ import annotations

import pytest

from plait.errors import PlanError
from plait.plan import Plan
from plait.verify.diagnosis.bisect import bisect, ingredients

FULL = Plan.parse("pp2:1f1b tp2:1d,sp dp4:zero3,replicate2 cp2 mb8 remat:full")


def run(fails, plan=FULL):
    tried = []

    def counted(candidate):
        tried.append(str(candidate))
        return fails(candidate)

    return bisect(plan, counted), tried


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (lambda p: p.dp.size > 1, ("dp",)),
        (lambda p: p.micro_batches > 1, ("mb",)),
        (lambda p: p.remat == "full", ("remat",)),
        (lambda p: p.pp.size > 1, ("pp",)),
        (lambda p: p.cp.size > 1 and p.dp.size > 1, ("cp", "dp")),
        (lambda p: p.tp.size > 1 and p.pp.size > 1 and p.micro_batches > 1, ("mb", "pp", "tp")),
    ],
)
def test_the_smallest_failing_plan(fails, expected):
    blame, tried = run(fails)
    assert tuple(sorted(blame.ingredients)) == expected
    assert fails(blame.smallest)
    assert len(tried) == len(set(tried)) <= 24
    assert expected[0] in blame.text()


def test_one_guilty_axis_takes_few_runs():
    _, tried = run(lambda p: p.dp.size > 1)
    assert len(tried) <= 6


def test_a_strategy_is_told_from_its_axis():
    assert run(lambda p: p.dp.strategy == "zero3")[0].strategies == ("dp",)
    assert "zero3" in run(lambda p: p.dp.strategy == "zero3")[0].text()
    assert run(lambda p: p.dp.size > 1)[0].strategies == ()


def test_when_one_device_fails_no_axis_is_blamed():
    blame, _ = run(lambda p: True)
    assert blame.ingredients == () and blame.smallest.world_size == 1
    assert "what every plan shares" in blame.text()


def test_a_plan_that_cannot_run_is_not_blamed():
    def fails(plan):
        if plan.pp.size == 1:
            raise PlanError("needs a pipeline")
        return plan.dp.size > 1

    blame, _ = run(fails)
    assert set(blame.ingredients) == {"dp", "pp"}


def test_ingredients():
    assert ingredients(Plan.parse("dp2:zero3 mb3 remat:full")) == ("dp", "mb", "remat")
    assert ingredients(Plan()) == ()
