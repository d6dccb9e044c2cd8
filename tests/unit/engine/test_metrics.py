"""The numbers of a run."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.comm.ledger import Ledger
from plait.errors import RunError
from plait.run.hooks import StepDone
from plait.run.memory import held_memory_bytes, peak_memory_bytes
from plait.run.metrics import MetricsFile, Tally, summary
from plait.trace import Timeline


def done(
    step: int, loss: float = 2.0, seconds: float = 0.5, tokens: int = 100, sent_bytes: int = 0
) -> StepDone:
    ledger = Ledger()
    if sent_bytes:
        ledger.add("dp", "all_reduce", sent_bytes)
    timeline = Timeline(rank=0, origin_seconds=float(step))
    with timeline.span("forward", "F"):
        pass
    result: Any = SimpleNamespace(
        loss=loss,
        grad_norm=1.0,
        tokens=tokens,
        ledger=ledger,
        timeline=timeline,
        details={},
        load=None,
        skipped=not math.isfinite(loss),
    )
    return StepDone(step, seconds, result)


def test_each_step_is_a_line(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        metrics.on_step(done(step))
    lines = [
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]  # before on_end
    assert lines[1] == {"step": 2, "loss": 2.0, "grad_norm": 1.0, "tokens": 100, "seconds": 0.5}
    metrics.on_end()


def test_a_line_has_the_learning_rate_and_the_memory_of_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.on_step(replace(done(3), learning_rate=0.3, memory_bytes=4096))
    metrics.on_end()
    line = json.loads(path.read_text())
    assert line["lr"] == 0.3 and line["memory"] == 4096


def test_the_held_memory_is_that_of_the_process() -> None:
    held = held_memory_bytes(torch.device("cpu"))
    assert held is not None
    assert 1e6 < held < 1.1 * peak_memory_bytes()  # the kernel adds a few pages later


def test_the_course_of_a_run_is_that_of_its_lines() -> None:
    tally = Tally()
    for step in (1, 2, 3):
        tally.on_step(done(step, loss=4.0 - step))
    tally.on_rollback(2)
    tally.on_step(done(3, loss=0.5))
    course = tally.course
    assert [one["step"] for one in course] == [1, 2, 3]
    assert course[2] == {"step": 3, "loss": 0.5, "grad_norm": 1.0, "tokens": 100, "seconds": 0.5}


def test_dropped_steps_are_counted_and_those_done_again_are_not() -> None:
    tally = Tally()
    for step, loss in enumerate([1.0, math.nan, math.nan, 2.0], 1):
        tally.on_step(done(step, loss=loss))
    assert tally.numbers() == {"skipped_steps": 2}
    tally.on_rollback(2)
    assert tally.numbers() == {"skipped_steps": 1}


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.on_step(done(1, loss=math.nan))
    metrics.on_end()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None


def test_a_resumed_run_writes_the_steps_that_it_repeats_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in (1, 2, 3):
        first.on_step(done(step))
    first.on_end()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    second = MetricsFile(path, first_step=3)
    for step in (3, 4):
        second.on_step(done(step))
    second.on_end()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_damaged_line_costs_no_other_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \xff}\n{"step": 3}\n{"step": 4}\n')
    MetricsFile(path, first_step=4)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'
    said = capsys.readouterr().err
    assert "line 2 cannot be read, and is left out; the steps of the other lines are kept" in said


def test_the_summary_is_computed_from_the_steps() -> None:
    tally = Tally()
    for step, seconds in ((1, 10.0), (2, 1.0), (3, 3.0)):
        tally.on_step(done(step, loss=3.0 - step, seconds=seconds, sent_bytes=40 * step))
    result = summary(tally, [5, 7], [tally.traffic(), {"dp": 81.0, "tp": 3.0}])
    assert (result["steps"], result["steps_here"]) == (3, 3)
    assert result["final_loss"] == 0.0
    assert result["tokens_per_second"] == 50.0  # the first step warms up
    assert result["unit"] == "tokens"
    tally.global_batch = tally.tokens[0]
    assert summary(tally, [5, 7], [{}])["unit"] == "samples"
    assert result["step_seconds_median"] == 3.0
    assert result["peak_memory"] == [5, 7]
    assert result["traffic"] == {"dp": 81.0, "tp": 3.0}
    assert tally.traffic() == {"dp": 80.0}


def test_a_single_step_counts_itself() -> None:
    tally = Tally()
    tally.on_step(done(1))
    assert tally.tokens_per_second() == 200.0


def test_only_the_last_steps_are_traced() -> None:
    tally = Tally()
    for step in range(1, 20):
        tally.on_step(done(step))
    assert len(tally.timeline().spans) == 5


def test_a_removed_folder_is_said_once_and_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    plan = path.with_name("plan.txt")
    metrics = MetricsFile(path, restore=plan.touch)
    metrics.on_step(done(1))
    shutil.rmtree(path.parent)
    for step in (2, 3):
        metrics.on_step(done(step))
    metrics.on_end()
    (line,) = capsys.readouterr().err.splitlines()
    assert "metrics.jsonl was removed while the run went on: its lines before step 2 are" in line
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 3]
    assert plan.exists()


def test_a_full_disk_is_a_failed_run(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.path = Path("/dev/full")
    with pytest.raises(
        RunError, match=r"/dev/full cannot be written: No space left .*step 7"
    ) as caught:
        metrics.on_step(done(7))
    assert caught.value.exit_code == 1
