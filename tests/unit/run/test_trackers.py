"""Trackers take the metrics of a run, go on with it, and never stop it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.run.hooks import RunStart, StepDone
from plait.run.trackers import hook
from plait.run.trackers.hook import Trackers
from plait.run.trackers.tracker import TrackedRun

CONFIG = {"model": {"name": "gpt"}, "train": {"lr": 0.1}}


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.report: Path | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def finish(self, report: Path | None) -> None:
        self.report = report


class Broken(Recorder):
    """A tracker whose service is away."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise ConnectionError("no route to host")


def done(step: int, loss: float = 1.0) -> StepDone:
    result: Any = SimpleNamespace(loss=loss, grad_norm=2.0, tokens=10)
    return StepDone(step, 0.5, result, learning_rate=0.1)


def walk(trackers: Trackers, steps: range, report: Path | None = None) -> None:
    anything: Any = None
    trackers.on_start(RunStart(anything, None, steps.start, steps.stop - 1))
    for step in steps:
        trackers.on_step(done(step))
    trackers.on_end()
    trackers.finish(report)


def test_names_are_conventional_and_evaluations_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Recorder] = []

    def make(run: TrackedRun) -> Recorder:
        made.append(Recorder(run))
        return made[-1]

    monkeypatch.setitem(hook.TRACKERS, "tensorboard", ("tensorboard", make))
    newest = (1, {"loss": 3.0, "perplexity": 20.0, "accuracy": None})
    trackers = Trackers(["tensorboard"], tmp_path, CONFIG, "dp2", lambda: newest)
    walk(trackers, range(1, 3), tmp_path / "report.html")
    recorder = made[0]
    assert recorder.run.settings() == {"plan": "dp2", "model.name": "gpt", "train.lr": 0.1}
    assert recorder.rows[0] == (
        1,
        {
            "train/loss": 1.0,
            "train/grad_norm": 2.0,
            "train/learning_rate": 0.1,
            "train/tokens": 10.0,
            "train/step_seconds": 0.5,
            "train/tokens_per_second": 20.0,
        },
    )
    assert recorder.rows[1] == (1, {"eval/loss": 3.0, "eval/perplexity": 20.0})
    assert [step for step, _ in recorder.rows] == [1, 1, 2]
    assert recorder.report == tmp_path / "report.html"


def test_numbers_that_are_none_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(TrackedRun(tmp_path, CONFIG, "dp1", 1))
    monkeypatch.setitem(hook.TRACKERS, "wandb", ("wandb", lambda run: recorder))
    trackers = Trackers(["wandb"], tmp_path, CONFIG, "dp1")
    anything: Any = None
    trackers.on_start(RunStart(anything, None, 1, 1))
    trackers.on_step(done(1, float("nan")))
    assert "train/loss" not in recorder.rows[0][1]


def test_a_tracker_that_fails_is_told_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(run: TrackedRun) -> Recorder:
        raise OSError("no such server")

    monkeypatch.setitem(hook.TRACKERS, "wandb", ("wandb", Broken))
    monkeypatch.setitem(hook.TRACKERS, "mlflow", ("mlflow", away))
    walk(Trackers(["wandb", "mlflow"], tmp_path, CONFIG, "dp1"), range(1, 4))
    told = capsys.readouterr().err
    assert told.count("wandb failed and is left out: ConnectionError: no route to host") == 1
    assert told.count("mlflow failed and is left out: OSError: no such server") == 1


@pytest.mark.filterwarnings("default")  # those of the package itself
def test_tensorboard_goes_on_with_its_series(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    walk(Trackers(["tensorboard"], tmp_path, CONFIG, "dp1"), range(1, 4))
    walk(Trackers(["tensorboard"], tmp_path, CONFIG, "dp1"), range(3, 6))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("default")  # those of the package itself
def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    report = tmp_path / "report.html"
    report.write_text("<p>run</p>")
    walk(Trackers(["mlflow"], tmp_path, CONFIG, "dp1"), range(1, 3), report)
    walk(Trackers(["mlflow"], tmp_path, CONFIG, "dp1"), range(3, 5), report)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        runs = database.execute("select count(*) from runs").fetchone()[0]
        steps = database.execute("select step from metrics where key = 'train/loss'").fetchall()
    assert runs == 1
    assert sorted(step for (step,) in steps) == [1, 2, 3, 4]
    assert list((tmp_path / "mlflow").rglob("report.html"))


@pytest.mark.filterwarnings("default")  # those of the package itself
def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    walk(Trackers(["wandb"], tmp_path, CONFIG, "dp1"), range(1, 3))
    assert list((tmp_path / "wandb").glob("offline-run-*"))
