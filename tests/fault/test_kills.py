"""A sample of `tests.fault.kills`: ranks die at random moments, and the bits are the same."""

from __future__ import annotations

import pytest

from tests.fault.kills import MAINS, STEPS, Case, Judge, Kill

SAMPLE = (
    Case(0, "dp2:zero3", (Kill(1, 2, 0.01),)),
    Case(1, "tp2 dp2", (Kill(0, 0, 0.3), Kill(2, 3, 0.0))),
    Case(2, "pp2:1f1b ep2 dp2 mb2", (Kill(3, 4, 0.02),)),
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("kills"))


@pytest.mark.slow
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.plan)
def test_a_run_whose_ranks_are_killed_ends_with_equal_bits(case: Case, judge: Judge) -> None:
    found, result = judge.judge(case)
    assert found == []
    assert result["recoveries"]
    for recovery in result["recoveries"]:
        assert recovery["steps_repeated"] <= 1
        assert "was killed by SIGKILL" in recovery["cause"]
        assert recovery["source"] in ("snapshot", "start")
    repeated = sum(recovery["steps_repeated"] for recovery in result["recoveries"])
    assert STEPS <= result["snapshots"]["count"] <= STEPS + repeated


@pytest.mark.slow
@pytest.mark.parametrize("copies", ["pinned", "between"])
def test_a_rank_that_dies_while_a_device_copies_costs_one_step(copies: str, judge: Judge) -> None:
    case = Case(3, "dp2:zero1", (Kill(1, 2, 0.005), Kill(0, 4, 0.015)))
    found, result = judge.judge(case, MAINS[copies])
    assert found == []
    assert [one["source"] for one in result["recoveries"]] == ["snapshot"] * 2
    assert all(one["steps_repeated"] <= 1 for one in result["recoveries"])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_kills_of_random_plans(seed: int, judge: Judge) -> None:
    found, _ = judge.judge(Case.draw(100 + seed))
    assert found == []
