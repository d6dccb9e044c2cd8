"""A checkpoint that is saved again has its name at every moment, with the old or the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.checkpoint import Checkpoint, Shard, save
from plait.checkpoint.exchange import exchange


def saved(path: Path, value: float) -> None:
    save(path, [Shard.whole("weight", torch.full((3,), value))], {})


def value_at(path: Path) -> float:
    weight = torch.zeros(3)
    Checkpoint.open(path).load([Shard.whole("weight", weight)])
    return float(weight[0])


def filled(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "file").write_text(text)
    return folder


def can_exchange(folder: Path) -> bool:
    return exchange(filled(folder / "first", "1"), filled(folder / "second", "2"))


def test_two_folders_change_names(tmp_path: Path) -> None:
    if not can_exchange(tmp_path):
        pytest.skip("this file system exchanges no names")
    assert (tmp_path / "first" / "file").read_text() == "2"
    assert (tmp_path / "second" / "file").read_text() == "1"


def test_a_name_that_is_not_there_is_left_so(tmp_path: Path) -> None:
    there = filled(tmp_path / "there", "1")
    assert not exchange(there, tmp_path / "missing")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_save_that_is_killed_never_leaves_its_name_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange(tmp_path):
        pytest.skip("this file system exchanges no names")
    path = tmp_path / "saved"
    saved(path, 1.0)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        rename(self, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    try:
        saved(path, 2.0)
    except KeyboardInterrupt:
        assert path.exists()
    assert value_at(path) == 2.0
    assert [one.name for one in tmp_path.glob("saved*")] == ["saved"]


def test_a_file_system_without_exchange_moves_the_old_one_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.checkpoint.write.exchange", lambda one, other: False)
    path = tmp_path / "saved"
    for value in (1.0, 2.0):
        saved(path, value)
        assert value_at(path) == value
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]
