"""The plans of a cover, and the clock that ends it."""

from __future__ import annotations

import time

import pytest

from plait.errors import PlanError
from plait.plan import Plan
from plait.verify.cover import PLANS, cover
from plait.verify.progress import Clock, predicted_seconds


def check(text: str) -> Plan:
    return Plan.parse(text).check()


def test_every_axis_is_in_the_cover_and_the_first_plans_add_one_each() -> None:
    plans, refused = cover(Plan.parse("dp1"), check)
    assert not refused
    axes = [{axis for axis in ("dp", "tp", "pp", "cp") if getattr(p, axis).size > 1} for p in plans]
    assert set().union(*axes) == {"dp", "tp", "pp", "cp"}
    assert axes[1:5] == [{"dp"}, {"tp"}, {"pp"}, {"cp"}]
    assert plans[5].ep == 2
    assert max(plan.world_size for plan in plans) == 4


def test_the_configs_own_plan_comes_first_and_once() -> None:
    plans, _ = cover(Plan.parse("dp2:zero3 mb2"), check)
    assert str(plans[0]) == "dp2:zero3 mb2"
    assert len(set(plans)) == len(plans) == len(PLANS)


def test_refused_plans_are_told_with_the_reason() -> None:
    def no_experts(text: str) -> Plan:
        if "ep2" in text:
            raise PlanError("no experts")
        return check(text)

    plans, refused = cover(Plan.parse("dp1"), no_experts)
    assert refused == {"dp2:zero1 ep2": "no experts"}
    assert all(plan.ep == 1 for plan in plans)


def test_a_clock_without_a_budget_never_ends() -> None:
    assert not Clock.of(None).is_over
    assert Clock(until=time.time() - 1).is_over
    assert not Clock.of(1000).is_over


def test_progress_says_what_begins_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(speaks=True, begun=time.time() - 10)
    clock.tell(1, 3, "probe a")
    clock.tell(2, 3, "probe b")
    Clock().tell(1, 1, "silent")
    assert capsys.readouterr().err == (
        "plait verify: probe a (1 of 3)\nplait verify: probe b (2 of 3, about 20 s left)\n"
    )


def test_a_longer_proof_is_predicted_to_take_longer() -> None:
    plan = Plan.parse("dp2")
    assert predicted_seconds(1.0, plan, 3, 12) > predicted_seconds(1.0, plan, 3, 4)
    assert predicted_seconds(1.0, plan, 3, 12) > predicted_seconds(0.1, plan, 3, 12)
