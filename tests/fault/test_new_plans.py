"""Ranks are lost for good: the run goes on under a plan for those that are left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint import Checkpoint
from plait.config import Config
from plait.errors import RankFailed
from tests.fault import kills
from tests.fault.kills import LIMIT_SECONDS, Case, Kill, trained

TOLERANCE = 1e-10
SMALLEST = 1e-8  # the bias of keys has no gradient, and what it holds is rounding of 1e-22


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


def largest_difference(left: Path, right: Path) -> float:
    one = Checkpoint.open(left)
    other = Checkpoint.open(right)
    assert one.meta["step"] == other.meta["step"] == kills.STEPS
    differences = []
    for name in one.names():
        a, b = one.tensor(name).double(), other.tensor(name).double()
        scale = b.abs().max().clamp(min=SMALLEST)
        differences.append(float((a - b).abs().max() / scale))
    return max(differences)


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
