"""The cost of the doctor: two ranks with and without its records, and its calls counted.

Runs come in pairs, first one with and one without, then the other way round. Processor seconds are
those of the launcher and its ranks together. The difference of two runs holds their noise, so the
calls of a step are counted too, and each is timed by itself.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery.runs import config_of, trained, without_doctor
from benchmarks.spread import quartiles
from plait.doctor.flight import FlightRecorder, Phase
from plait.launcher.seat import Seat
from plait.run import kept
from plait.run.job import TrainingRun

PLAN = "dp2"
PAIRS = 4
CALLS_FILE = "calls.json"
SPENT_FILE = "processor-seconds-{}.txt"
COUNTED = ("enter", "action", "step_done", "issue", "started", "wait", "ended")
NUM_TIMED = 20_000


@dataclass(frozen=True)
class Share:
    """A quantity with the doctor over that without, less one: the quartiles of the pairs."""

    low: float
    middle: float
    high: float

    @staticmethod
    def of(ratios: Sequence[float]) -> Share:
        """The quartiles of some ratios."""
        return Share(*quartiles([ratio - 1 for ratio in ratios]))

    def text(self) -> str:
        """`+0.4 % (-1.0 % to +1.2 %)`."""
        return f"{self.middle:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


@dataclass(frozen=True)
class DoctorCost:
    """Shares of a step: by processor time and by the clock of runs in pairs, and as counted."""

    processor: Share
    wall: Share
    counted: float
    calls: float
    microseconds: float

    def counted_text(self) -> str:
        """The calls of a step, and what they take."""
        return f"{self.counted:.2%}: {self.calls:.0f} calls of {self.microseconds:.1f} us a step"


@dataclass(frozen=True)
class _Spent:
    processor: float
    step: float


def weigh(steps: int, folder: Path) -> DoctorCost:
    """The cost of the doctor in runs of so many steps."""
    spent: dict[bool, list[_Spent]] = {True: [], False: []}
    for number in range(PAIRS):
        for has_doctor in (number % 2 == 0, number % 2 == 1):
            main = spending if has_doctor else spending_without
            spent[has_doctor].append(_spent(main, steps, folder / f"{number}-{has_doctor}"))
    pairs = list(zip(spent[True], spent[False], strict=True))
    trained(config_of(PLAN, steps, 0), folder / "counted", main=counting)
    calls = json.loads((folder / "counted" / CALLS_FILE).read_text())
    costs = seconds_of_calls(folder)
    a_step = sum(calls[name] * costs[name] for name in COUNTED) / steps
    num_calls = sum(calls.values()) / steps
    of_a_rank = statistics.median(one.processor for one in spent[False]) / steps / 2
    return DoctorCost(
        Share.of([one.processor / other.processor for one, other in pairs]),
        Share.of([one.step / other.step for one, other in pairs]),
        a_step / of_a_rank,
        num_calls,
        a_step / num_calls * 1e6,
    )


def _spent(main: Callable[..., Any], steps: int, folder: Path) -> _Spent:
    """The processor seconds of a run, launcher and ranks, and its median step by the clock."""
    began = time.process_time()
    run = trained(config_of(PLAN, steps, 0), folder, main=main)
    launcher = time.process_time() - began
    ranks = sum(float(path.read_text()) for path in folder.glob(SPENT_FILE.format("*")))
    return _Spent(launcher + ranks, run.step_seconds)


def spending(seat: Seat, job: TrainingRun) -> None:
    """`kept.run`, whose ranks write the processor seconds that they took."""
    began = time.process_time()
    kept.run(seat, job)
    _write_spent(seat, job, time.process_time() - began)


def spending_without(seat: Seat, job: TrainingRun) -> None:
    """The run without the doctor's records, whose ranks write their processor seconds."""
    began = time.process_time()
    without_doctor(seat, job)
    _write_spent(seat, job, time.process_time() - began)


def _write_spent(seat: Seat, job: TrainingRun, seconds: float) -> None:
    assert job.folder is not None
    (job.folder / SPENT_FILE.format(seat.number)).write_text(str(seconds))


def counting(seat: Seat, job: TrainingRun) -> None:
    """`kept.run`, whose first rank counts the calls of its flight record."""
    calls: Counter[str] = Counter()
    for name in COUNTED:
        setattr(FlightRecorder, name, _counted(getattr(FlightRecorder, name), name, calls))
    kept.run(seat, job)
    if job.folder is not None and seat.number == 0:
        (job.folder / CALLS_FILE).write_text(json.dumps({name: calls[name] for name in COUNTED}))


def _counted(act: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(act)
    def acting(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return act(*args, **kwargs)

    return acting


def seconds_of_calls(folder: Path) -> dict[str, float]:
    """The processor seconds of each call of a flight record that lies in a folder."""
    flight = FlightRecorder(0, 2, folder / "timed", (0, 1))
    entry = flight.issue("dp", "all_reduce", (0, 1), 1024)
    acts: dict[str, Callable[[], object]] = {
        "enter": lambda: flight.enter(Phase.STEPPING),
        "action": lambda: flight.action("forward 0"),
        "step_done": lambda: flight.step_done(1),
        "issue": lambda: flight.issue("dp", "all_reduce", (0, 1), 1024),
        "started": lambda: flight.started(entry),
        "wait": lambda: flight.wait(entry),
        "ended": lambda: flight.ended(entry, 0.0),
    }
    return {name: _timed(act) for name, act in acts.items()}


def _timed(act: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(NUM_TIMED):
        act()
    return (time.process_time() - began) / NUM_TIMED
