"""`remat:auto` beside a search: found where a plan nearly fits, and only where it is faster."""

from __future__ import annotations

import pytest

import plait
from plait.predict.planner.blocks import faster_by_blocks
from plait.predict.planner.choose import decide
from plait.predict.planner.fixed import Fixed
from plait.predict.planner.search import SearchSettings
from tests.unit.predict.cost.shapes import LLAMA_8B, config

ASKED = config(LLAMA_8B, 8192, 16)


def test_a_plan_that_nearly_fits_recomputes_a_few_blocks() -> None:
    choice = decide(ASKED, "l40sx8")
    first = choice.plans[0]
    found = faster_by_blocks(choice, SearchSettings())
    assert first.plan.remat != "none" and found is not None
    assert found.fits and found.step_seconds < 0.97 * first.step_seconds
    assert found.plan.remat == "auto" and {"none"} < set(found.remat)
    again = plait.estimate({**ASKED, "plan": {"remat": list(found.remat)}}, found.plan, "l40sx8")
    assert again.step_seconds == found.step_seconds
    assert again.memory == found.memory


@pytest.mark.parametrize("fix", ["remat:full", "remat:none"])
def test_a_decided_recomputation_stays(fix: str) -> None:
    choice = decide(ASKED, "h100x8", fix=fix)
    assert faster_by_blocks(choice, SearchSettings(fixed=Fixed.parse(fix))) is None


def test_nothing_is_gained_where_memory_is_ample() -> None:
    choice = decide(config(LLAMA_8B, 8192, 64), "b200x8")
    assert choice.plans[0].plan.remat == "none"
    assert faster_by_blocks(choice, SearchSettings()) is None
