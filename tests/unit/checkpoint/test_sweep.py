"""What killed saves leave in a run's folder is gone at its next start, and nothing else."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.folder import sweep
from plait.checkpoint.write import save
from plait.cli import train
from plait.engine.runlock import held
from plait.mesh import Shard

CONFIG = """
[model]
name = "mlp"
in_features = 4
hidden_size = 4
num_hidden_layers = 1
out_features = 2
[data]
name = "random"
[train]
steps = 1
global_batch = 2
"""
KILLED = ("step-00000004.tmp-0a1b2c", "step-00000002.old-9f9f9f")


def run_folder(path: Path) -> Path:
    """Two checkpoints, a save that was killed in its midst and one killed before its end."""
    checkpoints = path / "checkpoints"
    for step in (2, 4):
        shard = Shard.whole("weight", torch.ones(2))
        save(checkpoints / f"step-{step:08d}", [shard], {"step": step})
    for name in KILLED:
        (checkpoints / name).mkdir()
        (checkpoints / name / "rank-00000-of-00001.safetensors").write_bytes(b"half")
    return path


def names(path: Path) -> set[str]:
    return {one.name for one in (path / "checkpoints").iterdir()}


def age(path: Path, seconds: float) -> None:
    """Let what killed saves have left be written at this moment."""
    for name in KILLED:
        for one in (path / "checkpoints" / name, *(path / "checkpoints" / name).iterdir()):
            os.utime(one, (seconds, seconds))


def test_what_killed_saves_left_is_removed(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    age(run, 1000.0)
    assert sorted(sweep(run, 2000.0)) == sorted(KILLED)
    assert names(run) == {"step-00000002", "step-00000004", "latest"}


def test_what_is_written_since_the_lock_stays(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    age(run, 3000.0)
    assert sweep(run, 2000.0) == []
    assert set(KILLED) <= names(run)


def test_an_old_checkpoint_stays_where_nothing_took_its_place(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    age(run, 1000.0)
    (run / "checkpoints" / "step-00000002").rename(run / "checkpoints" / "aside")
    assert sweep(run, 2000.0) == [KILLED[0]]


def test_a_folder_without_checkpoints_is_nothing_to_sweep(tmp_path: Path) -> None:
    with held(tmp_path) as since:
        assert since is not None
        assert sweep(tmp_path, since) == []


def test_the_next_start_sweeps_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mlp.toml").write_text(CONFIG)
    run = run_folder(tmp_path / "run")
    age(run, 1000.0)
    keys: dict[str, Any] = {"config": str(tmp_path / "mlp.toml"), "plan": "dp1", "nproc": None}
    keys |= {
        "overrides": [],
        "steps": None,
        "out": run,
        "resume": run,
        "json": False,
        "profile": None,
        "live": False,
    }
    monkeypatch.setattr(train, "kept_alive", lambda task, size: {})
    monkeypatch.setattr(train, "view", lambda result: "")
    monkeypatch.setattr(train, "say", print)
    train.run(argparse.Namespace(**keys))
    said = capsys.readouterr().out
    assert "removed what killed saves left: step-00000002.old-9f9f9f, step-00000004.tmp" in said
    assert not set(KILLED) & names(run)
