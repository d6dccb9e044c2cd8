"""Trackers take the metrics of a run, go on with it, and never stop it."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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
        self.gone_back: list[int] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def go_back(self, step: int) -> None:
        self.gone_back.append(step)

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
    at_start = iter([None])
    evaluation = partial(next, at_start, newest)
    trackers = Trackers(["tensorboard"], tmp_path, CONFIG, "dp2", evaluation)
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


def walk_back(trackers: Trackers) -> None:
    """Four steps, of which two are done again with another loss."""
    anything: Any = None
    trackers.on_start(RunStart(anything, None, 1, 5))
    for step in (1, 2, 3, 4):
        trackers.on_step(done(step))
    trackers.on_rollback(2)
    for step in (3, 4, 5):
        trackers.on_step(done(step, 7.0))
    trackers.on_end()
    trackers.finish(None)


@pytest.mark.filterwarnings("default")  # those of the package itself
def test_tensorboard_shows_repeated_steps_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    walk_back(Trackers(["tensorboard"], tmp_path, CONFIG, "dp1"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    told = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert told == [(1, 1.0), (2, 1.0), (3, 7.0), (4, 7.0), (5, 7.0)]


@pytest.mark.filterwarnings("default")  # those of the package itself
def test_mlflow_has_repeated_steps_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    walk_back(Trackers(["mlflow"], tmp_path, CONFIG, "dp1"))
    assert read_mlflow(tmp_path).steps == [1, 2, 3, 4, 5]


def test_trackers_hear_of_steps_that_are_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(TrackedRun(tmp_path, CONFIG, "dp1", 1))
    monkeypatch.setitem(hook.TRACKERS, "wandb", ("wandb", lambda run: recorder))
    walk_back(Trackers(["wandb"], tmp_path, CONFIG, "dp1"))
    assert recorder.gone_back == [2]


def test_an_evaluation_that_is_made_up_for_comes_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(TrackedRun(tmp_path, CONFIG, "dp1", 5))
    monkeypatch.setitem(hook.TRACKERS, "wandb", ("wandb", lambda run: recorder))
    newest = (4, {"loss": 3.0})
    walk(Trackers(["wandb"], tmp_path, CONFIG, "dp1", lambda: newest), range(5, 7))
    assert [step for step, _ in recorder.rows] == [4, 5, 6]


def reported(folder: Path) -> Path:
    report = folder / "report.html"
    report.write_text("<p>run</p>")
    return report


class MLflowFile(NamedTuple):
    """What MLflow has kept."""

    runs: int
    steps: list[int]
    parameters: dict[str, str]


def read_mlflow(folder: Path) -> MLflowFile:
    with sqlite3.connect(folder / "mlflow.db") as database:
        runs = database.execute("select count(*) from runs").fetchone()[0]
        steps = database.execute("select step from metrics where key = 'train/loss'").fetchall()
        parameters = dict(database.execute("select key, value from params").fetchall())
    return MLflowFile(runs, sorted(step for (step,) in steps), parameters)


@pytest.mark.filterwarnings("default")  # those of the package itself
def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process repeats the third step, as a run does that was killed behind it."""
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    report = reported(tmp_path)
    walk(Trackers(["mlflow"], tmp_path, CONFIG, "dp1"), range(1, 4), report)
    walk(Trackers(["mlflow"], tmp_path, CONFIG, "dp2"), range(3, 6), report)
    kept = read_mlflow(tmp_path)
    assert (kept.runs, kept.steps) == (1, [1, 2, 3, 4, 5])
    assert kept.parameters == {"plan": "dp1", "model.name": "gpt", "train.lr": "0.1"}
    assert list((tmp_path / "mlflow").rglob("report.html"))
    walk(Trackers(["mlflow"], tmp_path, CONFIG, "dp1"), range(1, 3))  # the run begins anew
    kept = read_mlflow(tmp_path)
    assert (kept.runs, kept.steps) == (2, [1, 1, 2, 2, 3, 4, 5])


def read_wandb(file: Path) -> Iterator[Any]:
    """The records of a file of an offline run: a log of blocks, as LevelDB's."""
    from wandb.proto import wandb_internal_pb2

    content = file.read_bytes()
    position = 7  # behind the file's own head
    record = b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


@pytest.mark.filterwarnings("default")  # those of the package itself
def test_wandb_works_offline_and_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    report = reported(tmp_path)
    for steps in (range(1, 3), range(3, 5)):
        walk(Trackers(["wandb"], tmp_path, CONFIG, "dp2"), steps, report)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    records = [record for file in files for record in read_wandb(file)]
    (name,) = {record.run.run_id for record in records if record.HasField("run")}
    assert name == TrackedRun(tmp_path, CONFIG, "dp2", 1).id
    told = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.item}
        for one in (record.history for record in records if record.HasField("history"))
    ]
    assert [row["_step"] for row in told] == [1, 2, 3, 4]
    assert all(row["train/loss"] == 1.0 for row in told)
    config = {
        "/".join(item.nested_key) or item.key: json.loads(item.value_json)
        for record in records
        if record.HasField("run")
        for item in record.run.config.update
    }
    assert config["plan"] == "dp2"
    assert config["train.lr"] == 0.1
    artefacts = [record.request.log_artifact.artifact for record in records]
    artefacts += [record.artifact for record in records if record.HasField("artifact")]
    assert "report" in {one.name for one in artefacts}


@pytest.mark.filterwarnings("default")  # those of the package itself
def test_wandb_is_told_repeated_steps_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    walk_back(Trackers(["wandb"], tmp_path, CONFIG, "dp1"))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    steps = [
        json.loads(item.value_json)
        for record in read_wandb(file)
        if record.HasField("history")
        for item in record.history.item
        if ("/".join(item.nested_key) or item.key) == "_step"
    ]
    assert steps == [1, 2, 3, 4, 5]
    assert "less than current step" not in capfd.readouterr().err


@pytest.mark.filterwarnings("default")  # those of the package itself
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_fails_does_not_stop_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each real package, told to write where nothing can be, or to speak in an unknown way."""
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "nowhere")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/missing/folder/mlflow.db")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "run"
    folder.write_text("no folder")
    walk(Trackers([name], folder, CONFIG, "dp1"), range(1, 4), reported(tmp_path))
    told = capsys.readouterr().err
    assert told.count(f"warning: {name} failed and is left out: ") == 1
