"""`plait train` says where a checkpoint leaves nothing to do of what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.checkpoint import save
from plait.cli import train
from plait.config import Config
from plait.run.job import TrainingRun

CONFIG = """
[model]
name = "mlp"
in_features = 8
hidden_size = 8
num_hidden_layers = 1
out_features = 4
[data]
name = "random"
"""


def going_on(folder: Path, steps: int, profiled: int | None = None) -> TrainingRun:
    """A run of so many steps that goes on after step 24."""
    (folder / "tiny.toml").write_text(CONFIG)
    checkpoint = folder / "step-00000024"
    save(checkpoint, [], {"step": 24})
    config = Config.load(folder / "tiny.toml", [f"train.steps={steps}"])
    return TrainingRun(config, "dp1", checkpoint=checkpoint, profiled_step=profiled)


def test_a_run_without_a_step_left_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train._tell_what_is_left(going_on(tmp_path, 10))
    told = capsys.readouterr().err
    assert told == "plait train: no step is left to do: 24 are done, and train.steps = 10\n"


def test_a_step_to_profile_that_was_done_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train._tell_what_is_left(going_on(tmp_path, 30, profiled=24))
    told = capsys.readouterr().err
    assert told == "plait train: --profile 24 records nothing: the run goes on after step 24\n"


def test_a_run_with_all_that_was_asked_for_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = going_on(tmp_path, 30, profiled=25)
    train._tell_what_is_left(task)
    train._tell_what_is_left(replace(task, checkpoint=None))
    assert capsys.readouterr().err == ""
