"""`keep_gathered` in a search: chosen where zero3 has room to spare, and where it is faster."""

from __future__ import annotations

import pytest

import plait
from plait.predict.planner.choose import decide
from tests.unit.predict.cost.shapes import LLAMA_8B, config

ASKED = config(LLAMA_8B, 8192, 32)
CLUSTER = "h100x32"


def test_a_plan_that_nearly_fits_whole_keeps_some_of_its_blocks() -> None:
    first, *others = plait.choose(ASKED, CLUSTER, top=100)
    assert first.keep_gathered and 0 < len(first.keep_gathered) < 32
    assert first.plan.dp.strategy == "zero3" and first.fits
    assert all(first.step_seconds < 0.995 * one.step_seconds for one in others)
    assert all(one.keep_gathered is None for one in others)
    assert first.plan not in {one.plan for one in others}, "one plan is listed once"


def test_its_numbers_are_those_of_the_estimate_with_the_same_key() -> None:
    first = plait.choose(ASKED, CLUSTER, top=1)[0]
    kept = {**ASKED, "plan": {"keep_gathered": list(first.keep_gathered or ())}}
    again = plait.estimate(kept, first.plan, CLUSTER)
    assert again.step_seconds == first.step_seconds and again.memory == first.memory
    assert again.memory_limit == pytest.approx(first.memory_limit)
    assert again.as_dict()["keep_gathered"] == first.as_dict()["keep_gathered"]
    plain = plait.estimate(ASKED, first.plan, CLUSTER)
    assert plain.step_seconds > first.step_seconds


def test_the_risk_holds() -> None:
    first = plait.choose(ASKED, CLUSTER, top=1, risk=0.32)[0]
    assert first.keep_gathered and first.fits_probability >= 0.68 - 1e-9


def test_what_the_config_names_is_not_chosen_again() -> None:
    plans = plait.choose({**ASKED, "plan": {"keep_gathered": 0}}, CLUSTER, top=100)
    assert not any(one.keep_gathered for one in plans)
    plans = plait.choose({**ASKED, "plan": {"keep_gathered": 3}}, CLUSTER, top=100, fix="zero3")
    assert {one.keep_gathered for one in plans} == {(29, 30, 31)}


def test_only_time_and_only_plait_keep_blocks() -> None:
    for other in ({"objective": "memory"}, {"framework": "fsdp"}):
        assert not any(one.keep_gathered for one in plait.choose(ASKED, CLUSTER, top=100, **other))


def test_no_number_of_kept_blocks_of_its_plan_beats_the_choice() -> None:
    """Each number of last blocks of the same plan, one after another."""
    choice = decide(ASKED, CLUSTER)
    first = choice.plans[0]
    for count in range(33):
        asked = {**ASKED, "plan": {"keep_gathered": count}}
        one = plait.estimate(asked, first.plan, CLUSTER)
        if one.fits and one.memory.total <= first.memory.total:
            assert one.step_seconds >= first.step_seconds * (1 - 1e-9), count
