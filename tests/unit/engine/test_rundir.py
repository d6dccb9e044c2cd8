"""Which folder a run may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.checkpoint.folder import write_index
from plait.engine.rundir import RunFolder, new_run, resumed_run
from plait.errors import CheckpointError, ConfigError


def _run_with(path: Path, *steps: int) -> RunFolder:
    folder = RunFolder(path)
    for step in steps:
        folder.checkpoint(step).mkdir(parents=True)
        write_index(folder.checkpoint(step), {"files": []})
    return folder


def test_a_new_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    runs = [new_run(None, "gpt", tmp_path) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(run.path.is_dir() and run.path.name.startswith("gpt-") for run in runs)


def test_an_empty_folder_may_be_used_and_a_full_one_may_not(tmp_path: Path) -> None:
    assert new_run(tmp_path / "out", "gpt").path.is_dir()
    assert new_run(tmp_path / "out", "gpt").path.is_dir()
    (tmp_path / "out" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"not empty.*--resume"):
        new_run(tmp_path / "out", "gpt")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        new_run(tmp_path / "file" / "out", "gpt")


def test_a_run_has_a_checkpoint_once_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000999.tmp").mkdir(parents=True)
    assert not RunFolder(tmp_path).has_checkpoint
    assert _run_with(tmp_path, 20).has_checkpoint


@pytest.mark.parametrize("source", ["run", "run/checkpoints/step-00000010"])
def test_a_run_continues_in_its_folder(tmp_path: Path, source: str) -> None:
    _run_with(tmp_path / "run", 10)
    folder, checkpoint = resumed_run(tmp_path / source, None, "gpt")
    assert folder.path == tmp_path / "run"
    assert checkpoint == RunFolder(tmp_path / "run").checkpoint(10)


def test_a_run_continues_elsewhere_when_both_are_named(tmp_path: Path) -> None:
    _run_with(tmp_path / "run", 10)
    folder, checkpoint = resumed_run(tmp_path / "run", tmp_path / "new", "gpt")
    assert folder.path == tmp_path / "new"
    assert checkpoint.is_relative_to(tmp_path / "run")


def test_without_a_folder_the_latest_run_of_the_name_continues(tmp_path: Path) -> None:
    _run_with(tmp_path / "gpt-1", 10)
    (tmp_path / "gpt-2").mkdir()
    _run_with(tmp_path / "mlp-3", 10)
    folder, _ = resumed_run(None, None, "gpt", tmp_path)
    assert folder.path == tmp_path / "gpt-1"


def test_nothing_to_resume_from_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run of 'gpt'"):
        resumed_run(None, None, "gpt", tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        resumed_run(tmp_path, None, "gpt")
    with pytest.raises(CheckpointError, match="is no folder"):
        resumed_run(tmp_path / "nowhere", None, "gpt")
