"""A run that is saved and loaded is held against one device that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from plait.comm import World
from plait.datasets import Loader
from plait.errors import PlanError
from plait.plan import Plan
from plait.verify import Report
from plait.verify.probes import with_optimizer
from plait.verify.record.observe import join
from plait.verify.resumed import Leg, _first_leg, _second_leg, check_resumable
from tests.parity.verify_problems import problem


def both_legs(world: World, plan: str, folder: str, fault: str) -> Report:
    changed = with_optimizer(problem("even"), "adamw")
    record = join(_first_leg(world, Leg(changed, plan, 2, folder)))
    second = Leg(changed, plan, 2, folder, record, plan)
    if fault == "data":
        with patch.object(Loader, "load_state_dict", lambda *_: None):
            return _second_leg(world, second)
    if fault == "weights":
        from plait.engine.engine import Engine

        def load(engine: Engine, path: str) -> dict[str, Any]:
            return {
                "loader": {"epoch": 0, "position": 24, "seed": 3, "num_samples": 4096},
                "step": 2,
            }

        with (
            patch.object(Engine, "load", load),
            patch.object(Loader, "load_state_dict", lambda *_: None),
        ):
            return _second_leg(world, second)
    return _second_leg(world, second)


@pytest.mark.parametrize("plan", ["dp2:zero1", "tp2"])
def test_a_resumed_run_is_equal(ranks, tmp_path: Path, plan: str) -> None:
    text = f"{plan} precision:float64"
    report = ranks(2, both_legs, text, str(tmp_path / "saved"), "", plan=plan)[0]
    assert report.ok, report.text()
    assert report.num_steps == 4 and report.title == f"resume under {text}"


@pytest.mark.parametrize(
    ("fault", "words"), [("data", "and the data"), ("weights", "was not load")]
)
def test_what_a_resume_loses_is_named(ranks, tmp_path: Path, fault: str, words: str) -> None:
    text = "dp2 precision:float64"
    report = ranks(2, both_legs, text, str(tmp_path / "saved"), fault, plan="dp2")[0]
    assert not report.ok
    assert (report.findings[0].cause, report.findings[0].axis) == ("resume", "resume")
    assert words in report.findings[0].text


def test_delayed_updates_are_refused() -> None:
    with pytest.raises(PlanError, match="write pp2:1f1b"):
        check_resumable([Plan.parse("pp2:2bw mb4")])
