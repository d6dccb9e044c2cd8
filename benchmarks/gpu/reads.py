"""What it costs that the host waits for the sums of each step: two ways to decide, by turns."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial

from benchmarks.gpu.child import Turn
from benchmarks.gpu.measuring import WARM, Build, clear, get_ready, wait
from benchmarks.gpu.models import SMALL, SUBJECTS, Subject
from benchmarks.gpu.steps import Steps, plait_steps, plait_steps_in_graphs
from benchmarks.spread import quartiles

TURNS = 6
BUILDS: dict[str, Build] = {"plait": plait_steps, "plait, graphs": plait_steps_in_graphs}
DECIDES = {"the device": True, "the host": False}


def prepare(device: str, number: str) -> dict[str, str]:
    """Compile."""
    return get_ready({"plait": plait_steps}, _subjects(device)[0], device)


def measure(turn: Turn, number: str) -> None:
    """A row for each model and way to launch; the host's time over the device's."""
    turn.record.head(
        "who decides on a step",
        ("model", "system", "ms, the device", "ms, the host", "host / device", "its quartiles"),
    )
    for subject in _subjects(turn.device):
        for name, build in BUILDS.items():
            if turn.device == "cuda" or build is plait_steps:
                _compare(turn, subject, name, build)


def _subjects(device: str) -> list[Subject]:
    both = [SUBJECTS[0], SMALL]
    return both if device == "cuda" else [one.small() for one in both]


def _compare(turn: Turn, subject: Subject, name: str, build: Build) -> None:
    made: dict[str, Steps] = {
        who: partial(build, defers=defers)(subject, turn.device) for who, defers in DECIDES.items()
    }
    for steps in made.values():
        for _ in range(WARM):
            steps.step()
    groups: dict[str, list[float]] = defaultdict(list)
    for _ in range(TURNS):
        for who, steps in made.items():
            wait(turn.device)
            start = time.perf_counter()
            for _ in range(subject.group):
                steps.step()
            wait(turn.device)
            groups[who].append((time.perf_counter() - start) / subject.group)
    for steps in made.values():
        steps.close()
    made.clear()
    clear(turn.device)
    own, other = (groups[who] for who in DECIDES)
    low, middle, high = quartiles([late / early for early, late in zip(own, other, strict=True)])
    ms = [f"{1e3 * quartiles(one)[1]:.2f}" for one in (own, other)]
    spread = f"{low:.3f} .. {high:.3f}"
    turn.record.row(subject.title, name, *ms, f"{middle:.3f}", spread)
    turn.record.keep(model=subject.title, system=name, device=own, host=other)
