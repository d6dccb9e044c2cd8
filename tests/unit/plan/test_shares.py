"""`[plan] shares`: the whole numbers that they mean, and what they ask of plan and batch."""

from __future__ import annotations

import pytest

from plait.errors import PlanError
from plait.plan import Plan, check_shares, shares_of, whole_shares


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ((3, 1), (3, 1)),
        ((1.5, 0.5), (3, 1)),
        ((4, 2, 2), (2, 1, 1)),
        ((0.1, 0.2), (1, 2)),
        ((), ()),
    ],
)
def test_shares_are_ratios(given: tuple[float, ...], whole: tuple[int, ...]) -> None:
    assert whole_shares(given) == whole


def test_shares_belong_to_the_data_ranks() -> None:
    assert shares_of(Plan.parse("dp2 pp2:1f1b"), (3, 1)) == (3, 1)
    assert shares_of(Plan.parse("tp2"), (3, 1)) == (1,)
    assert shares_of(Plan.parse("dp3"), None) == (1, 1, 1)
    with pytest.raises(PlanError, match=r"plan.shares \[3, 1\] has 2 numbers and dp4 needs 4"):
        shares_of(Plan.parse("dp4:zero1"), (3.0, 1.0))


@pytest.mark.parametrize("plan", ["dp2:local,every2", "dp2:async-server,stale1"])
def test_shares_need_ranks_that_step_together(plan: str) -> None:
    with pytest.raises(PlanError, match=r"step together.*take dp2 or dp2:zero1"):
        check_shares(Plan.parse(plan), (3, 1), 16)
    check_shares(Plan.parse(plan), (1, 1), 16)


def test_every_micro_batch_has_its_exact_share() -> None:
    check_shares(Plan.parse("dp2 mb2"), (3, 1), 16)
    check_shares(Plan.parse("dp2 mb2"), (2, 2), 3)  # equal shares differ by one sample at most
    expected = "global_batch 20 must be a multiple of 8, the sum 4 of plan.shares [3, 1] x mb2"
    with pytest.raises(PlanError) as caught:
        check_shares(Plan.parse("dp2 mb2"), (1.5, 0.5), 20)
    assert expected in str(caught.value)
    assert str(caught.value).endswith("; the nearest are 16 and 24")
    with pytest.raises(PlanError, match=r"the least is 8$"):
        check_shares(Plan.parse("dp2 mb2"), (3, 1), 6)
