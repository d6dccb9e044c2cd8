"""Every schedule by its name in the plan grammar, each written once as a short generator.

`make` is the door: a name, or the path of a text file; whatever comes from outside is verified before it is returned.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.errors import ScheduleError, nearest
from plait.pipeline.actions import Schedule
from plait.pipeline.schedules.gpipe import gpipe
from plait.pipeline.schedules.naive import naive
from plait.pipeline.schedules.one_f_one_b import one_f_one_b

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}


def make(name: str, num_ranks: int, num_micro_batches: int, virtual: int = 1) -> Schedule:
    """The schedule of that name for p ranks, m micro-batches and `virtual` stages a rank (interleaved only)."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ScheduleError(f"{name}: {num_ranks} ranks and {num_micro_batches} micro-batches; both must be at least 1")
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule is called '{name}'; {nearest(name, SCHEDULES)}")
    return SCHEDULES[name](num_ranks, num_micro_batches)
