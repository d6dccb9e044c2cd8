"""A run that torchrun starts again: known by its name, and told in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cli.train import _starts_again
from plait.run.hooks import StepDone
from plait.run.restarts import recoveries_of, restarted
from plait.run.rundir import RunFolder


def test_a_run_is_known_by_its_name_on_a_machine_that_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert not _starts_again(tmp_path)
    RunFolder(tmp_path).run_id.write_text("mine\n")
    assert _starts_again(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert not _starts_again(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not _starts_again(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert _starts_again(tmp_path)


def test_a_restart_is_a_recovery_once_a_step_is_done(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.plan.write_text("dp3\n")
    folder.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    (hook,) = restarted(folder, "dp2", "start", 0)
    assert recoveries_of(folder, None) == []
    result: Any = None
    for step in (1, 2):
        hook.on_step(StepDone(step, 0.1, result))
    (recovery,) = recoveries_of(folder, None)
    assert (recovery["step"], recovery["steps_repeated"]) == (3, 3)
    assert (recovery["plan_before"], recovery["plan_after"]) == ("dp3", "dp2")
    assert (recovery["source"], recovery["lost_ranks"]) == ("start", [])
    assert recovery["seconds"] >= 0


def test_a_plan_of_somebodys_own_is_no_plan_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.plan.write_text("step one: call Bob\nstep two: rest\n")
    (hook,) = restarted(folder, "dp2", "start", 0)
    result: Any = None
    hook.on_step(StepDone(1, 0.1, result))
    (recovery,) = recoveries_of(folder, None)
    assert recovery["plan_before"] == "dp2"


def test_bytes_that_are_no_text_cost_no_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    folder = RunFolder(tmp_path)
    folder.run_id.write_bytes(b"\xff\xfe\n")
    assert not _starts_again(tmp_path)
    folder.plan.write_bytes(b"\xff\n")
    folder.metrics.write_bytes(b'{"step": 3}\n{"step": \xff}\n{"step": 5}\n')
    folder.restarts.write_bytes(b'\xff\n[1]\n{"step": 2}\n')
    (hook,) = restarted(folder, "dp2", "start", 4)
    result: Any = None
    hook.on_step(StepDone(5, 0.1, result))
    (recovery,) = recoveries_of(folder, None)
    assert (recovery["step"], recovery["steps_repeated"]) == (5, 1)
