"""Systems that take turns in one process, and the table of their medians."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from statistics import median
from typing import Any

from benchmarks.gpu.child import Turn
from benchmarks.gpu.measuring import Build, Measured, clear, take_turn
from benchmarks.gpu.models import Subject
from benchmarks.gpu.predicted import estimated, living_bytes, preset
from benchmarks.gpu.record import say

TURNS = 2
COLUMNS = (
    *("model", "system", "tokens/s", "/ by hand", "peak GB", "/ by hand", "peak of steps GB"),
    *("/ by hand", "TFLOP/s", "build s", "first step s", "graphs made", "spread of groups"),
)
After = Callable[[str, Callable[[], Any]], None]


def compare(turn: Turn, subject: Subject, systems: Mapping[str, Build], after: After) -> None:
    """Let the systems take turns. Print the rows of all that this call of the script measured, and
    what was predicted.
    """
    taken: dict[str, list[Measured]] = {}
    lasted: dict[str, float] = {}
    if turn.ready:
        say(f"\n{subject.title}, compiled: {turn.ready}")
        turn.record.keep(model=subject.title, compiled=turn.ready)
    for number in range(TURNS):
        for name, build in systems.items():
            if number and (name not in taken or turn.left < lasted[name]):
                continue
            began = time.monotonic()
            try:
                measured = take_turn(
                    build,
                    subject,
                    turn.device,
                    (lambda step, name=name: after(name, step)) if not number else None,
                )
            except Exception as error:  # the other systems go on
                turn.record.failed(f"{subject.title}, {name}", error)
                error.__traceback__ = None
                clear(turn.device)
                continue
            taken.setdefault(name, []).append(measured)
            lasted[name] = time.monotonic() - began
            turn.record.keep(
                model=subject.title,
                system=name,
                turn=number,
                tokens=subject.num_tokens,
                **asdict(measured),
            )
    taken = _measured(turn, subject)
    turn.record.head(f"{subject.title}: {subject.batch} x {subject.seq_len} tokens", COLUMNS)
    hand = [name for name in taken if not name.startswith("plait")]
    for name in taken:
        turn.record.row(subject.title, name, *_cells(subject, name, taken, hand))
    if "plait" in taken and "plait" in systems:
        _predict(turn, subject, taken["plait"])


def _measured(turn: Turn, subject: Subject) -> dict[str, list[Measured]]:
    """The turns of a subject, by system, of other processes too."""
    taken: dict[str, list[Measured]] = {}
    names = {one.name for one in fields(Measured)}
    for line in turn.record.kept():
        if line.get("model") == subject.title and "step_seconds" in line:
            numbers = {key: value for key, value in line.items() if key in names}
            taken.setdefault(line["system"], []).append(Measured(**numbers))
    return taken


def step_seconds(turns: list[Measured]) -> float:
    """The median of all groups of all turns."""
    return median(seconds for one in turns for seconds in one.step_seconds)


def _cells(
    subject: Subject, name: str, taken: Mapping[str, list[Measured]], hand: list[str]
) -> list[str]:
    turns = taken[name]
    seconds = step_seconds(turns)
    groups = [one for each in turns for one in each.step_seconds]
    whole = max(one.peak_bytes for one in turns)
    steps = max(one.steps_peak_bytes for one in turns)
    speeds = wholes = steps_peaks = ""
    if name.startswith("plait") and hand:
        speeds = ", ".join(f"{step_seconds(taken[one]) / seconds:.3f}" for one in hand)
        wholes = ", ".join(
            f"{whole / max(1, *(t.peak_bytes for t in taken[one])):.3f}" for one in hand
        )
        steps_peaks = ", ".join(
            f"{steps / max(1, *(t.steps_peak_bytes for t in taken[one])):.3f}" for one in hand
        )
    return [
        f"{subject.num_tokens / seconds:,.0f}",
        speeds,
        f"{whole / 1e9:.2f}",
        wholes,
        f"{steps / 1e9:.2f}",
        steps_peaks,
        f"{turns[0].flops / seconds / 1e12:.1f}",
        f"{turns[0].build_seconds:.1f}",
        f"{turns[0].first_seconds:.1f}",
        str(sum(one.new_graphs for one in turns)),
        f"{min(groups) / seconds:.3f} .. {max(groups) / seconds:.3f}",
    ]


def _predict(turn: Turn, subject: Subject, turns: list[Measured]) -> None:
    guess = estimated(subject)
    seconds = step_seconds(turns)
    steps = max(one.steps_peak_bytes for one in turns)
    lives = living_bytes(guess)
    parts = {key: value for key, value in asdict(guess.breakdown).items() if value}
    turn.record.head(
        f"{subject.title}: predicted for {preset()}",
        (
            "step s",
            "/ measured",
            "memory that lives GB",
            "/ measured peak of steps",
            "parts of the step ms",
        ),
    )
    turn.record.row(
        f"{guess.step_seconds:.4f}",
        f"{guess.step_seconds / seconds:.3f}",
        f"{lives / 1e9:.2f}",
        f"{lives / max(1, steps):.3f}",
        ", ".join(f"{key} {value * 1e3:.1f}" for key, value in parts.items()),
    )
    turn.record.keep(
        model=subject.title,
        preset=preset(),
        predicted_step_seconds=guess.step_seconds,
        measured_step_seconds=seconds,
        predicted_bytes=asdict(guess.memory),
        predicted_total_bytes=guess.memory.total,
        predicted_living_bytes=lives,
        measured_bytes=steps,
        breakdown=parts,
    )
