"""The benchmark of recovery prints what it has measured, also when a signal cuts it short."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.recovery import bench, doctor, runs

from plait.errors import RankFailed
from plait.launcher.keeper import RunResults

COST = doctor.DoctorCost(
    doctor.Share.of([1.004] * 4), doctor.Share.of([0.98, 1.0, 1.0, 1.02]), 0.005, 45.0, 1.1
)
ROW = bench.Row("dp4:zero1", 0.875, 2, 240.0, (1.5, 2.5), 1, 0.021, 0.004, 0.07, is_equal=True)


def test_a_run_that_a_signal_ended_is_cut_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stopped = {"stopped": 3, "signal": signal.SIGTERM, "recoveries": []}
    ended = RunResults([stopped], signal.SIGTERM)
    monkeypatch.setattr(runs, "keep", lambda *_: ended)
    with pytest.raises(runs.CutShort) as caught:
        runs.trained(runs.config_of("dp2", 4, 1), tmp_path / "run")
    assert caught.value.number == signal.SIGTERM
    assert caught.value.run is not None and caught.value.run.num_steps == 3


@pytest.mark.parametrize(
    ("end", "number"),
    [(SystemExit(143), signal.SIGTERM), (KeyboardInterrupt(), signal.SIGINT)],
)
def test_a_second_signal_cuts_a_run_short_too(
    end: BaseException, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def kept(*_: object) -> None:
        raise end

    monkeypatch.setattr(runs, "keep", kept)
    with pytest.raises(runs.CutShort) as caught:
        runs.trained(runs.config_of("dp2", 4, 1), tmp_path / "run")
    assert caught.value.number == number


def test_a_signal_in_the_midst_of_a_long_run_leaves_the_row_of_what_has_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenth of the steps took 4 s, at 0.1 s each; the run was ended after 50, which took 8 s."""
    steps = [f'{{"step": {step}, "seconds": 0.1}}\n' for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(steps))
    tenth = runs.Trained(tmp_path, 4.0, {"steps": 40, "step_seconds_median": 0.1})
    lost = {"seconds": 1.5, "steps_repeated": 1}
    shaken = runs.Trained(tmp_path, 8.0, {"stopped": 50, "recoveries": [lost, lost]})

    def trained(config: object, folder: Path, killer: object = None) -> runs.Trained:
        if killer is not None:
            raise runs.CutShort(signal.SIGTERM, shaken)
        return tenth

    monkeypatch.setattr(bench, "trained", trained)
    monkeypatch.setattr(sys, "argv", ["bench", "--long", "--out", str(tmp_path)])
    assert bench.main() == 128 + signal.SIGTERM
    shown = capsys.readouterr().out
    assert "| dp4:zero1 | 0.62 | 2 | 900 | 1.50 | 1 |" in shown
    assert "| not compared |" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_between_two_runs_ends_with_the_table(
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(plan: str, seconds: float, rates: object, into: bench.Results) -> None:
        into.rows.append(ROW)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    monkeypatch.setattr(bench, "measure", measured)
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path)])
    assert bench.main() == 128 + number
    assert f"cut short by signal {number}" in (shown := capsys.readouterr().out)
    assert "| disturbed runs with equal bits | all | 1 of 1 |" in shown
    assert signal.getsignal(number) == before


def test_a_run_that_fails_ends_with_the_table_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(seconds: float, into: bench.Results) -> None:
        raise RankFailed("rank 1 was killed by SIGKILL")

    monkeypatch.setattr(bench, "measure", lambda *words: words[-1].rows.append(ROW))
    monkeypatch.setattr(bench, "lose_half", failed)
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path)])
    assert bench.main() == 1
    shown = capsys.readouterr().out
    assert "ended: rank 1 was killed by SIGKILL; what was measured until then:" in shown
    assert "| disturbed runs with equal bits | all | 2 of 2 |" in shown


def test_a_row_whose_bits_are_not_compared_counts_as_neither(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = replace(ROW, is_equal=None)
    bench.conclude(bench.Results([ROW, row]), tmp_path)
    assert "| disturbed runs with equal bits | all | 1 of 1 |" in capsys.readouterr().out
    assert row.cells()[-1] == "not compared"


def test_the_table_has_the_aims_and_the_picture_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = bench.Results([ROW], new_plan_seconds=3.25, new_plan="dp2", doctor=COST)
    bench.conclude(results, tmp_path)
    shown = capsys.readouterr().out
    assert "| useful fraction, least of all runs | 0.8 at one kill in 15 s | 0.88 |" in shown
    assert "| 3 s | 2.00 s, at most 2.50 s |" in shown
    assert "| 5 s | 3.25 s, to a step of 'dp2' |" in shown
    assert "| 1 % | +0.4% (+0.4% to +0.4%) |" in shown
    assert "| 1 % | 0.50%: 45 calls of 1.1 us a step |" in shown
    assert "| stall of a checkpoint | 1 % of a step | 0.4% |" in shown
    assert "| 7.0% of a step |" in shown
    picture = (tmp_path / bench.PICTURE).read_text()
    assert "useful fraction" in picture and "dp4:zero1" in picture


def test_the_steps_after_a_checkpoint_are_compared_with_the_others(tmp_path: Path) -> None:
    """40 steps, a checkpoint every 4: the first step after each takes half as long again."""
    lines = [{"step": step, "seconds": 0.15 if step % 4 == 1 else 0.1} for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert runs.Trained(tmp_path, 4.5, {"steps": 40}).slowed() == pytest.approx(0.5)


def test_the_calls_of_a_record_are_timed(tmp_path: Path) -> None:
    costs = doctor.seconds_of_calls(tmp_path)
    assert set(costs) == set(doctor.COUNTED)
    assert all(seconds > 0 for seconds in costs.values())
