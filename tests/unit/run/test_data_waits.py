"""Waits of steps for their batches: counted, drawn into the trace, and none in the examples."""

from __future__ import annotations

import json
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.cli import main
from plait.config import Config
from plait.datasets import Loader
from plait.run.assemble import make_loader
from plait.run.data_numbers import TRACED_STEPS, BatchWaits, mark_batches, of_slowest
from plait.run.hooks import BatchWait, Hook, StepDone
from plait.run.loop import fit
from plait.run.runfiles import timeline_of
from plait.trace import Timeline

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))
SAMPLES = [(torch.tensor([number]), torch.tensor(number)) for number in range(12)]


def test_a_batch_is_ready_once_a_thread_has_read_it() -> None:
    loader = Loader(SAMPLES, 4, workers=1)
    assert not loader.is_ready
    next(loader)
    wait(loader._queue)
    assert loader.is_ready
    loader.skip(1)  # what was read ahead is for another place
    assert not loader.is_ready
    alone = Loader(SAMPLES, 4)
    next(alone)
    assert not alone.is_ready


class Noted(Hook):
    """The waits that the loop tells of."""

    def __init__(self) -> None:
        self.waits: list[BatchWait | None] = []

    def on_step(self, done: StepDone) -> None:
        self.waits.append(done.wait)


class LongSteps:
    """An engine whose steps take as long as the reading of all batches that are asked for."""

    def __init__(self, loader: Loader) -> None:
        flight = SimpleNamespace(enter=lambda phase: None)
        self.world = SimpleNamespace(
            recorder=SimpleNamespace(flight=flight), device=torch.device("cpu")
        )
        self.driver = SimpleNamespace(synchronize=lambda: None)
        self.step_index = 0
        self.is_cut = True
        self.may_defer = False
        self._loader = loader

    def step(self, batch: Any) -> Any:
        wait(self._loader._queue)
        self.step_index += 1
        return SimpleNamespace(outcome=SimpleNamespace(is_told=True))

    def flush(self) -> None:
        """Nothing is left to do."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_step_of_an_example_finds_its_batch(path: Path) -> None:
    loader = make_loader(Config.load(path))
    noted = Noted()
    engine: Any = LongSteps(loader)
    fit(engine, loader, 6, [noted])
    ready = [one.was_ready for one in noted.waits if one is not None]
    assert ready == [False] + [True] * 5


def test_late_batches_are_counted_but_for_the_first() -> None:
    waits = BatchWaits()
    for step in range(8):
        waits.add(BatchWait(float(step), 0.5, was_ready=step % 2 == 1), is_first=step == 0)
    assert (waits.num_late, waits.seconds) == (3, 3.5)
    assert of_slowest([waits, BatchWaits(5, 0.1)]) == {"steps": 5, "seconds": 3.5}
    assert [one.began_seconds for one in waits.last] == [3.0, 4.0, 5.0, 6.0, 7.0]


def test_waits_have_a_lane_that_no_timeline_reads(tmp_path: Path) -> None:
    trace = Timeline(0).to_chrome()
    waits = BatchWaits()
    waits.add(BatchWait(3.0, 0.5, was_ready=True), is_first=False)
    mark_batches(trace, [BatchWaits(), waits], last_step=7, origin_seconds=2.0)
    (event,) = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert (event["pid"], event["ts"], event["dur"]) == (1, 1e6, 5e5)
    assert event["args"] == {"step": 7, "was_ready": True}
    assert not Timeline.from_chrome(trace).spans
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    assert not timeline_of(tmp_path / "trace.json").spans


@pytest.mark.slow
def test_a_run_tells_of_its_waits(tmp_path: Path) -> None:
    words = ["train", str(EXAMPLES[0]), "--steps", "7", "--out", str(tmp_path / "run"), "--json"]
    assert main(words) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 <= summary["data_waits"]["steps"] <= 6
    assert summary["data_waits"]["seconds"] >= 0
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    waits = [event for event in trace["traceEvents"] if event.get("cat") == "data"]
    steps = {(event["pid"], event["args"]["step"]) for event in waits}
    assert steps == {(rank, step) for rank in (0, 1) for step in range(8 - TRACED_STEPS, 8)}
