"""A model of the speed table: plait and two loops by hand, by turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.child import Turn
from benchmarks.gpu.measuring import Build, get_ready
from benchmarks.gpu.models import SUBJECTS, Subject
from benchmarks.gpu.profiles import profile
from benchmarks.gpu.steps import autocast_steps, bf16_steps, plait_steps
from benchmarks.gpu.turns import compare

SYSTEMS: dict[str, Build] = {
    "plait": plait_steps,
    "by hand, autocast": autocast_steps,
    "by hand, bf16 + masters": bf16_steps,
}
PROFILED = (0, 2)
"""Subjects whose kernels are listed."""


def prepare(device: str, number: str) -> dict[str, str]:
    """Compile."""
    return get_ready(SYSTEMS, _subject(device, number), device)


def measure(turn: Turn, number: str) -> None:
    """The tables of one model."""
    subject = _subject(turn.device, number)

    def after(name: str, step: Callable[[], Any]) -> None:
        if int(number) in PROFILED:
            try:
                profile(f"{subject.title} {name}", step, turn.device, turn.record)
            except Exception as error:  # the table matters more
                turn.record.failed(f"profile of {name}", error)

    compare(turn, subject, SYSTEMS, after)


def _subject(device: str, number: str) -> Subject:
    subject = SUBJECTS[int(number)]
    return subject if device == "cuda" else subject.small()
