"""The numbers of a run: a line a step while it goes, and one rank's summary when it ends."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from plait.config import PlanSection
from plait.errors import RunError
from plait.plan import Plan
from plait.run.assemble import kept_under
from plait.run.counted import batch_of, counted_unit
from plait.run.data_numbers import TRACED_STEPS, BatchWaits
from plait.run.hooks import Hook, RunStart, StepDone
from plait.run.json_lines import JsonLine, read_lines, rows_of
from plait.run.rundir import RunFolder
from plait.trace import Timeline
from plait.trace.breakdown import TimeBreakdown, of_steps
from plait.values import JsonObject

OF_STEPS: Final = (
    *("step_seconds_median", "tokens_per_second", "unit", "peak_memory", "traffic"),
    *("bubble_fraction", "breakdown", "data_waits", "staleness"),
)
"""The numbers of a summary that are measured while steps are done."""


class MetricsFile(Hook):
    """`metrics.jsonl`: step, loss, grad_norm, tokens and seconds of each step, written as it
    happens. For one rank only.
    """

    def __init__(
        self,
        path: Path,
        first_step: int = 1,
        restore: Callable[[], None] = lambda: None,
    ) -> None:
        """`restore` writes what else belongs into the folder, where that was removed."""
        self.path = path
        self._file: IO[str] | None = None
        self._restore = restore
        _keep_before(path, first_step)

    def needs_state(self, step: int) -> bool:
        return False

    def on_step(self, done: StepDone) -> None:
        """Add one line; it is on disk when this returns, so a killed run loses no step that it
        printed. Errors: `RunError` where it cannot be written.
        """
        try:
            line = json.dumps(_record(done), allow_nan=False)
            self._open(done.step).write(f"{line}\n")
        except OSError as error:
            with suppress(OSError):
                self.on_end()
            self._file = None
            raise RunError(
                f"{self.path} cannot be written: {error.strerror or error}; the run ends after "
                f"step {done.step}, and --resume continues from its last checkpoint"
            ) from error

    def on_rollback(self, step: int) -> None:
        """Drop the lines of the steps that are done again."""
        self.on_end()
        self._file = None
        _keep_before(self.path, step + 1)

    def _open(self, step: int) -> IO[str]:
        """The file, made again if it was taken away: what was written to it since would be lost."""
        if self._file is not None and not _is_there(self.path, self._file):
            self._file.close()
            self._file = None
            print(
                f"{self.path} was removed while the run went on: its lines before step {step} are "
                "gone; it is made again",
                file=sys.stderr,
                flush=True,
            )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._restore()
        if self._file is None:
            self._file = self.path.open("a", buffering=1)
        return self._file

    def on_end(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _record(done: StepDone) -> JsonObject:
    """One line of `metrics.jsonl`."""
    result = done.result
    record = {**_course(done), **result.details}
    if result.load is not None:
        record["experts"] = result.load.as_dict()
    return record


def _course(done: StepDone) -> JsonObject:
    """The numbers of a step that curves are drawn of."""
    result = done.result
    more = {"lr": done.learning_rate, "memory": done.memory_bytes}
    return {
        "step": done.step,
        "loss": _finite(result.loss),
        "grad_norm": _finite(result.grad_norm),
        "tokens": int(result.tokens),
        "seconds": done.seconds,
        **{key: value for key, value in more.items() if value is not None},
    }


def _is_there(path: Path, file: IO[str]) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False


@dataclass
class Tally(Hook):
    """Measurements of one rank over its run: times, tokens, bytes sent by axis, last timelines."""

    memory_before: int | None = None
    """The bytes that the rank held before its model was made; None where it is unknown."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    """Whether each step was dropped, as one whose gradient was no number is."""
    course: list[JsonObject] = field(default_factory=list)
    """The steps as `metrics.jsonl` has them."""
    bytes_by_axis: dict[str, int] = field(default_factory=dict)
    num_counted: int = 0
    last_step: int = 0
    timelines: deque[Timeline] = field(default_factory=lambda: deque(maxlen=TRACED_STEPS))
    waits: BatchWaits = field(default_factory=BatchWaits)
    global_batch: int = 0

    def on_start(self, start: RunStart) -> None:
        """Learn where the run begins."""
        self.last_step = start.first_step - 1
        self.global_batch = batch_of(start)

    def needs_state(self, step: int) -> bool:
        return False

    def on_step(self, done: StepDone) -> None:
        """Take in one step."""
        self.last_step = done.step
        self.losses.append(float(done.result.loss))
        self.seconds.append(done.seconds)
        self.tokens.append(int(done.result.tokens))
        self.skipped.append(done.result.skipped)
        self.course.append(_course(done))
        self.num_counted += 1
        for axis, sent_bytes in done.result.ledger.by_axis().items():
            self.bytes_by_axis[axis] = self.bytes_by_axis.get(axis, 0) + sent_bytes
        self.timelines.append(done.result.timeline)
        if done.wait is not None:
            self.waits.add(done.wait, is_first=self.num_counted == 1)

    def on_rollback(self, step: int) -> None:
        """Forget the steps that are done again."""
        num_gone = self.last_step - step
        self.last_step = step
        for values in (self.losses, self.seconds, self.tokens, self.skipped):
            del values[len(values) - num_gone :]
        del self.course[len(self.course) - num_gone :]
        for _ in range(min(num_gone, len(self.timelines))):
            self.timelines.pop()
            if self.waits.last:
                self.waits.last.pop()

    def numbers(self) -> JsonObject:
        """How many steps were dropped."""
        return {"skipped_steps": sum(self.skipped)}

    def has_news(self, path: Path) -> bool:
        """Whether a file of the run's end is to be written. A run that had no step left to do keeps
        the existing ones.
        """
        return bool(self.seconds) or not path.exists()

    def traffic(self) -> dict[str, float]:
        """Bytes that this rank sent in a step, by axis: counted, the mean over the steps."""
        num_steps = max(1, self.num_counted)
        return {axis: total / num_steps for axis, total in self.bytes_by_axis.items()}

    def tokens_per_second(self) -> float:
        """Tokens of all ranks by the clock; the first step warms up and is left out where there is
        another.
        """
        start = 1 if len(self.seconds) > 1 else 0
        seconds = sum(self.seconds[start:])
        return sum(self.tokens[start:]) / seconds if seconds > 0 else 0.0

    def breakdown(self) -> TimeBreakdown:
        """Where the time of the last steps went on this rank."""
        seconds = self.seconds[len(self.seconds) - len(self.timelines) :]
        return of_steps(list(zip(self.timelines, seconds, strict=True)))

    def timeline(self) -> Timeline:
        """The last steps of this rank as one timeline; every span says its `step`."""
        first = self.last_step - len(self.timelines) + 1
        return Timeline.merge(
            timeline.labelled(step=step) for step, timeline in enumerate(self.timelines, first)
        )


def summary(
    tally: Tally, peak_memory_bytes: list[int], traffic: list[dict[str, float]]
) -> JsonObject:
    """The numbers of `plait train --json`, from one rank's tally and what every rank sent: peak
    memory and traffic.

    `steps` counts from the beginning of training, `steps_here` those of this start alone, which the
    times are of. `traffic` is, axis by axis, that of the rank that sent most.
    """
    axes = sorted({axis for sent in traffic for axis in sent})
    return {
        "steps": tally.last_step,
        "steps_here": len(tally.seconds),
        "first_loss": tally.losses[0] if tally.losses else None,
        "final_loss": tally.losses[-1] if tally.losses else None,
        "tokens_per_second": tally.tokens_per_second(),
        "unit": counted_unit(tally.tokens, tally.global_batch),
        "step_seconds_median": statistics.median(tally.seconds) if tally.seconds else None,
        "peak_memory": peak_memory_bytes,
        "traffic": {axis: max(sent.get(axis, 0) for sent in traffic) for axis in axes},
    }


def planned(plan: str, section: PlanSection) -> JsonObject:
    """The plan of a run, the recomputation of each block under `remat:auto`, and the blocks that
    zero3 keeps whole.
    """
    found: JsonObject = {"plan": plan}
    parsed = Plan.parse(plan)
    if parsed.remat == "auto" and section.remat:
        found["remat"] = list(section.remat)
    keep = kept_under(parsed, section)
    if keep:
        found["keep_gathered"] = list(keep) if isinstance(keep, tuple) else keep
    return found


def written_numbers(folder: RunFolder, tally: Tally, plan: str) -> JsonObject:
    """The numbers of a run that its folder has: the loss of its first step, by `metrics.jsonl`.

    A start that had no step left to do measured none. The loss of the last step is there then. So
    is what `summary.json` says of the steps, where they ran under the same plan.
    """
    numbers: JsonObject = {"first_loss": _loss_of_line(folder.metrics, 0)}
    if tally.losses:
        return numbers
    numbers["final_loss"] = _loss_of_line(folder.metrics, -1)
    with suppress(OSError, ValueError, KeyError, TypeError):
        written = json.loads(folder.summary.read_text())
        if written["plan"] == plan:
            numbers |= {key: written[key] for key in OF_STEPS if key in written}
    return numbers


def _loss_of_line(path: Path, index: int) -> float | None:
    """The loss of a line of `metrics.jsonl`; None where there is none."""
    with suppress(OSError, KeyError, TypeError, IndexError):
        return _finite(rows_of(path)[index]["loss"])
    return None


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


def _keep_before(path: Path, first_step: int) -> None:
    """Drop the lines of steps that a resumed run is going to repeat, so that every step stands
    there once. Damaged lines go too; the last is what a killed run left half written.
    """
    lines = read_lines(path)
    kept = [line for line in lines if _step_of(line) < first_step]
    if len(kept) == len(lines):
        return
    damaged = [str(line.number) for line in lines[:-1] if _step_of(line) == math.inf]
    if damaged:
        print(
            f"{path} is damaged: line {', '.join(damaged)} cannot be read, and is left out; the "
            "steps of the other lines are kept",
            file=sys.stderr,
            flush=True,
        )
    part = path.with_suffix(".part")
    part.write_bytes(b"".join(line.raw + b"\n" for line in kept))
    part.replace(path)


def _step_of(line: JsonLine) -> float:
    """The step of a line; infinite for one that cannot be read."""
    step = None if line.row is None else line.row.get("step")
    return step if isinstance(step, int) else math.inf
