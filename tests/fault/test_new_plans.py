"""Ranks are lost for good: the run goes on under a plan for those that are left."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.config import Config
from plait.errors import RankFailed
from plait.launcher import keeper
from plait.launcher.seat import Note, Seat
from plait.run import kept
from plait.run.job import TrainingRun
from tests.fault.kills import LIMIT_SECONDS, Case, Kill, largest_difference, trained

TOLERANCE = 1e-10
AWAY = range(2, 4)  # the steps between which the lost rank is away


class WithRecovery(Case):
    """A case with a recovery of its own."""

    recovery: dict[str, Any] = {}  # noqa: RUF012 - set by each test

    def config(self) -> Config:
        tables = super().config().as_dict()
        sgd = {"optimizer": "sgd", "momentum": 0.9}  # AdamW makes steps of gradients that are zero
        tables["train"] = {**tables["train"], **sgd}
        tables["recovery"] = {**self.recovery, "hang_seconds": LIMIT_SECONDS}
        tables["cluster"] = {"name": "rtx4090x4"}  # nobody need measure this machine
        return Config.load(tables)


def case_of(plan: str, *lost: Kill, **recovery: Any) -> Case:
    case = WithRecovery(0, plan, lost)
    object.__setattr__(case, "recovery", recovery)
    return case


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    trained(case_of("dp1 precision:float64"), folder, ())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("replan", [["pp2:1f1b mb2 precision:float64"], "auto"], ids=str)
def test_half_of_the_ranks_never_come_back(replan: Any, one_device: Path, tmp_path: Path) -> None:
    lost = (Kill(1, 2, 0.0), Kill(3, 4, 0.0))
    case = case_of("dp4:zero1 precision:float64", *lost, replan=replan, restarts=0)
    result = trained(case, tmp_path, case.kills)
    plans = [one["plan_after"] for one in result["recoveries"]]
    assert plans and all("precision:float64" in plan for plan in plans)
    assert result["plan"] == plans[-1] != result["recoveries"][0]["plan_before"]
    assert largest_difference(tmp_path, one_device) < TOLERANCE
    assert torch.isfinite(torch.tensor(result["first_loss"]))


def comes_late(seat: Seat, job: TrainingRun) -> None:
    """A rank of a run; one that is started again comes when the others are at the end of `AWAY`.

    They wait for it there, so that they have steps left when it comes.
    """
    assert job.folder is not None
    mark = job.folder / f"begun-{seat.number}"
    awaited = job.folder / "awaited"
    while mark.exists() and not awaited.exists():
        time.sleep(0.005)
    mark.touch()
    ends_before = Seat.ends_before

    def waits(own: Seat, step: int) -> bool:
        while own._generation == 1 and step == AWAY.stop and not own.is_recalled:
            awaited.touch()
            time.sleep(0.005)
        return ends_before(own, step)

    Seat.ends_before = waits  # type: ignore[method-assign]
    kept.run(seat, job)


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 5], ids=["by a checkpoint", "by a snapshot"])
def test_a_rank_that_comes_back_brings_the_old_plan_back(
    every: int, one_device: Path, tmp_path: Path
) -> None:
    recovery = {"replan": ["dp2 precision:float64"], "restarts": 1, "snapshot_every": every}
    lost = Kill(3, AWAY.start, 0.0)
    case = case_of("dp4:zero1 precision:float64", lost, wait_seconds=0.0, **recovery)
    result = trained(case, tmp_path, case.kills, comes_late)
    left, returned = result["recoveries"]
    assert left["plan_after"] == returned["plan_before"] == "dp2 precision:float64"
    assert left["plan_before"] == returned["plan_after"] == result["plan"]
    assert (left["lost_ranks"], returned["lost_ranks"]) == ([3], [])
    assert returned["cause"] == "a rank is back"
    assert returned["source"] == ("snapshot" if every else "checkpoint")
    assert (returned["step"], returned["steps_repeated"]) == (AWAY.stop, 0)
    assert largest_difference(tmp_path, one_device) < TOLERANCE


def test_ranks_at_work_are_not_awaited_by_one_that_a_plan_leaves_over() -> None:
    killed: list[int] = []
    run: Any = object.__new__(keeper._Run)
    run._generation = 1
    run._members = (0, 1)
    run._lost = []
    run._policy = keeper.Policy()
    run._first_note = -1e9
    run._ended = {}
    run._notes = {2: Note()}
    process = SimpleNamespace(pid=11, kill=lambda: killed.append(1))
    run._ranks = {seat: SimpleNamespace(has_come=True, process=process) for seat in range(3)}
    run._look_at_the_silent()
    assert not killed
    run._notes[0] = Note("its connection broke")
    run._look_at_the_silent()
    assert killed


@pytest.mark.slow
def test_a_run_without_a_plan_for_what_is_left_ends(tmp_path: Path) -> None:
    case = case_of("dp2", Kill(1, 2, 0.0), replan="never", restarts=0, snapshot_every=1)
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        trained(case, tmp_path, case.kills)
    other = replace(case, plan="dp3:ring")
    object.__setattr__(other, "recovery", {"replan": ["dp4"], "restarts": 0})
    folder = tmp_path / "other"
    folder.mkdir()
    with pytest.raises(RankFailed, match=r"no plan of .* replan fits the 2 ranks"):
        trained(other, folder, case.kills)
