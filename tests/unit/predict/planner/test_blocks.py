"""`remat:auto` in a search: chosen where a plan nearly fits, and only where it is faster."""

from __future__ import annotations

import pytest

import plait
from tests.unit.predict.cost.shapes import LLAMA_8B, config

ASKED = config(LLAMA_8B, 8192, 16)


def test_a_plan_that_nearly_fits_recomputes_a_few_blocks() -> None:
    first, second = plait.choose(ASKED, "l40sx8", top=2)
    assert first.plan.remat == "auto" and {"none"} < set(first.remat)
    assert second.plan.remat not in ("none", "auto")
    assert first.fits and first.step_seconds < 0.97 * second.step_seconds
    again = plait.estimate({**ASKED, "plan": {"remat": list(first.remat)}}, first.plan, "l40sx8")
    assert again.step_seconds == first.step_seconds
    assert again.memory == first.memory and again.memory_limit == pytest.approx(first.memory_limit)


def test_it_is_as_sure_to_fit_as_the_plan_before_it() -> None:
    for risk in (None, 0.2, 0.02):
        first, second = plait.choose(ASKED, "l40sx8", top=2, risk=risk)
        least = 0.95 if risk is None else 1 - risk
        sure = min(second.fits_probability, least)
        assert first.fits_probability >= sure - 1e-9, (risk, str(first))


@pytest.mark.parametrize("fix", ["remat:full", "remat:none"])
def test_a_decided_recomputation_stays(fix: str) -> None:
    plans = plait.choose(ASKED, "h100x8", fix=fix, top=100)
    assert {f"remat:{one.plan.remat}" for one in plans} == {fix}


def test_the_cheapest_plan_may_choose_by_blocks() -> None:
    first, *others = plait.choose(ASKED, "l40sx8", top=100, objective="cost")
    assert first.plan.remat == "auto"
    assert all(first.cost_per_million_tokens < one.cost_per_million_tokens for one in others)
    fastest = plait.choose(ASKED, "l40sx8")[0]
    assert first.cost_per_million_tokens <= fastest.cost_per_million_tokens


def test_only_plait_chooses_by_blocks_and_not_for_least_memory() -> None:
    for other in ({"objective": "memory"}, {"framework": "megatron-core"}):
        plans = plait.choose(ASKED, "l40sx8", top=100, **other)
        assert all(one.plan.remat != "auto" for one in plans)


def test_nothing_is_gained_where_memory_is_ample() -> None:
    plans = plait.choose(config(LLAMA_8B, 8192, 64), "b200x8", top=100)
    assert {one.plan.remat for one in plans[:5]} == {"none"}
