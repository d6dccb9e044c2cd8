"""The benchmark of recovery prints what it has measured, also when a signal cuts it short."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from benchmarks.recovery import bench, runs

from plait.launcher.keeper import Kept

ROW = bench.Row("dp4:zero1", 0.875, 2, 240.0, (1.5, 2.5), 1, 0.021, 0.004, is_equal=True)


def test_a_run_that_a_signal_ended_is_cut_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = Kept([{"stopped": 3, "signal": signal.SIGTERM}], signal.SIGTERM)
    monkeypatch.setattr(runs, "keep", lambda *_: ended)
    with pytest.raises(runs.CutShort) as caught:
        runs.trained(runs.config_of("dp2", 4, 1), tmp_path / "run")
    assert caught.value.number == signal.SIGTERM


def test_the_table_has_the_aims_and_the_picture_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = bench.Results([ROW], new_plan_seconds=3.25, new_plan="dp2", doctor_fraction=0.004)
    bench.conclude(results, tmp_path)
    shown = capsys.readouterr().out
    assert "| useful fraction, least of all runs | 0.8 at one kill in 15 s | 0.88 |" in shown
    assert "| 3 s | 2.00 s, at most 2.50 s |" in shown
    assert "| 5 s | 3.25 s, to a step of 'dp2' |" in shown
    assert "| 1 % | +0.4% |" in shown
    picture = (tmp_path / bench.PICTURE).read_text()
    assert "useful fraction" in picture and "dp4:zero1" in picture
