"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from plait.engine.balance import Load
from plait.run.hooks import RunStart, StepDone
from plait.run.progress import Lines, Pace, ProgressBar, progress
from tests.unit.engine.test_metrics import done


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _run(hook: ProgressBar | Lines, first: int = 1, last: int = 5) -> None:
    hook.on_start(RunStart(None, None, first, last))
    for step in range(first, last + 1):
        hook.on_step(done(step, loss=1.0 / step))
    hook.on_end()


def test_the_stream_chooses() -> None:
    assert isinstance(progress(io.StringIO()), Lines)
    assert isinstance(progress(Terminal()), ProgressBar)


def test_lines_show_the_first_and_the_last_step_when_the_run_is_short() -> None:
    stream = io.StringIO()
    _run(Lines(stream, every_seconds=1000))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/5  loss 1.0000  200 tokens/s")
    assert lines[1].startswith("step 5/5  loss 0.2000")
    assert lines[1].endswith("0:00 left")


def test_lines_come_as_time_passes() -> None:
    stream = io.StringIO()
    _run(Lines(stream, every_seconds=0))
    assert len(stream.getvalue().splitlines()) == 5


def test_the_bar_shows_loss_speed_memory_and_time_left() -> None:
    stream = Terminal()
    _run(ProgressBar(stream))
    text = stream.getvalue()
    for part in ("5/5", "loss 0.2000", "tokens/s", "GB", "left"):
        assert part in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_the_pace_names_samples_where_a_step_counts_them() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    lines.on_start(RunStart(None, SimpleNamespace(global_batch=200), 1, 1))
    lines.on_step(done(1))
    assert "200 samples/s" in stream.getvalue()


def test_the_pace_leaves_the_first_step_out_once_there_is_another() -> None:
    pace = Pace(4)
    pace.add(done(1, seconds=100.0))
    assert pace.step_seconds == 100.0
    pace.add(done(2, seconds=1800.0))
    assert pace.step_seconds == 1800.0
    assert pace.text().endswith("1:00:00 left")


def test_the_line_tells_where_tokens_went() -> None:
    load = Load(("a",), ((3.0, 1.0),), (3.0, 1.0), dropped=0.25, busiest=1.5)
    assert load.text() == "busiest expert 1.50 x the mean, 25.0 % dropped"
    assert replace(load, dropped=0.0).text() == "busiest expert 1.50 x the mean"
    assert load.as_dict() == {"busiest": 1.5, "dropped": 0.25, "ranks": [3, 1], "layers": [[3, 1]]}
    stream = io.StringIO()
    lines = Lines(stream)
    lines.on_start(RunStart(None, None, 1, 1))
    result: Any = SimpleNamespace(loss=1.0, tokens=4, load=load)
    lines.on_step(StepDone(1, 0.5, result))
    assert stream.getvalue().rstrip().endswith(load.text())
