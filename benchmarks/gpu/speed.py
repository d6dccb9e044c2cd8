"""A model of the speed table: plait and two loops by hand, by turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.child import Turn
from benchmarks.gpu.measuring import Build, get_ready
from benchmarks.gpu.models import SUBJECTS, Subject
from benchmarks.gpu.profiles import profile
from benchmarks.gpu.steps import (
    autocast_steps,
    bf16_steps,
    plait_steps,
    plait_steps_in_eight_bits,
    plait_steps_in_graphs,
)
from benchmarks.gpu.turns import compare
from plait.engine import eight_bits

SYSTEMS: dict[str, Build] = {
    "plait": plait_steps,
    "by hand, autocast": autocast_steps,
    "by hand, bf16 + masters": bf16_steps,
    **({"plait, fp8": plait_steps_in_eight_bits} if eight_bits.is_at_hand() else {}),
}
WITH_GRAPHS = (0,)
"""Subjects that train with a CUDA graph, too: those that wait for the host."""
PROFILED = (0, 2)
"""Subjects whose kernels are listed."""
PROFILED_SYSTEMS = ("plait", "plait, graphs", "by hand, autocast", "by hand, bf16 + masters")


def prepare(device: str, number: str) -> dict[str, str]:
    """Compile."""
    return get_ready(systems_of(device, number), _subject(device, number), device)


def measure(turn: Turn, number: str) -> None:
    """The tables of one model."""
    subject = _subject(turn.device, number)

    def after(name: str, step: Callable[[], Any]) -> None:
        if int(number) in PROFILED and name in PROFILED_SYSTEMS:
            try:
                profile(f"{subject.title} {name}", step, turn.device, turn.record)
            except Exception as error:  # the table matters more
                turn.record.failed(f"profile of {name}", error)

    compare(turn, subject, systems_of(turn.device, number), after)


def systems_of(device: str, number: str) -> dict[str, Build]:
    """The systems that take turns on a subject; a processor records no graphs."""
    if device != "cuda" or int(number) not in WITH_GRAPHS:
        return SYSTEMS
    return {**SYSTEMS, "plait, graphs": plait_steps_in_graphs}


def _subject(device: str, number: str) -> Subject:
    subject = SUBJECTS[int(number)]
    return subject if device == "cuda" else subject.small()
