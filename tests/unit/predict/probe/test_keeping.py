"""The rates at which this machine keeps a run's state."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from plait.errors import RankFailed
from plait.predict.cost.campaign import KEEPING_KEYS
from plait.predict.probe import recovering
from plait.predict.probe.keeping import keeping
from plait.predict.probe.recovering import recovery_seconds


def test_copies_checkpoints_and_a_start_are_measured(tmp_path: Path) -> None:
    found = keeping(2, tmp_path)
    assert set(found) == {*KEEPING_KEYS, "start_seconds"}
    assert all(value > 0 for value in found.values())
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_where_nothing_can_be(tmp_path: Path) -> None:
    assert "write_bytes_per_second" not in keeping(1, tmp_path / "none")


def test_a_rank_is_killed_and_replaced_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    before = multiprocessing.active_children()
    seconds = recovery_seconds(2)
    assert seconds is not None and 0.01 < seconds < 60
    assert "SIGKILL" not in capfd.readouterr().err
    assert [one for one in multiprocessing.active_children() if one not in before] == []


def test_a_machine_that_cannot_recover_has_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RankFailed("rank 1 was killed")

    monkeypatch.setattr(recovering, "keep", fails)
    assert recovery_seconds(2) is None
