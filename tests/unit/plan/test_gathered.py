"""`[plan] keep_gathered`: which blocks it names, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from plait.errors import PlanError
from plait.plan import Plan, check_kept, kept_blocks, kept_text

ZERO3 = Plan.parse("dp2:zero3 mb2")


def test_a_number_means_the_last_blocks_and_a_list_their_numbers() -> None:
    assert kept_blocks(ZERO3, 2, 6) == (4, 5)
    assert kept_blocks(ZERO3, (3, 0, 3), 6) == (0, 3)
    assert kept_blocks(ZERO3, 6, 6) == tuple(range(6))
    assert (
        kept_blocks(ZERO3, 0, 6) == kept_blocks(ZERO3, None, 6) == kept_blocks(ZERO3, (), 0) == ()
    )
    assert kept_blocks(Plan.parse("dp2:zero2"), 2, 6) == ()


@pytest.mark.parametrize(
    ("keep", "blocks", "message"),
    [
        (7, 6, "the model has 6 blocks; give 0 to 6"),
        ((6,), 6, "[6] has block 6, and the model has 6 blocks; their numbers are 0 to 5"),
        ((0,), 0, "names blocks, and this model has none; leave it out"),
        ("auto", 6, "is chosen by the planner"),
    ],
)
def test_other_blocks_are_refused(keep: Any, blocks: int, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        kept_blocks(ZERO3, keep, blocks)


@pytest.mark.parametrize("text", ["dp2", "dp2:zero1", "dp4:zero2,replicate2", "tp2 dp2:server"])
def test_plans_that_gather_nothing_are_refused(text: str) -> None:
    plan = Plan.parse(text)
    with pytest.raises(PlanError, match=f"take dp{plan.dp.size}:zero3, or leave keep_gathered out"):
        check_kept(plan, 2)
    for keep in (None, "auto", 0, ()):
        check_kept(plan, keep)  # type: ignore[arg-type]  # words are told apart by their values
    check_kept(ZERO3, 2)
    check_kept(Plan.parse("tp2"), 2)


def test_the_text_of_blocks() -> None:
    assert kept_text((0, 1, 2, 5, 7, 8)) == "blocks 0 to 2, 5, 7 to 8"
    assert kept_text(()) == "no block"
    assert kept_text(3) == "the last 3 of its blocks"
