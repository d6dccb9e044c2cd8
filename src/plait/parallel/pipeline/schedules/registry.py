"""Generators of schedules by name: each enters itself where it is written, with `@generates`.

A name is the key of a row in `plait.plan.facts.SCHEDULES`. The package imports all of its modules,
so a new module is found without a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import Schedule

Generator = TypeVar("Generator", bound=Callable[..., Schedule])

GENERATORS: dict[str, Callable[..., Schedule]] = {}


def generates(name: str) -> Callable[[Generator], Generator]:
    """Enter a function as the generator of the schedule `name`, and leave it as it is.

    It is called with (p, m): ranks and micro-batches. A third argument are the stages a rank, where
    the row leaves them open. For an asynchronous schedule it is the number of steps. Raises
    `ScheduleError` for a name that another function has.
    """

    def enter(generator: Generator) -> Generator:
        other = GENERATORS.setdefault(name, generator)
        if other is not generator:
            raise ScheduleError(
                f"two generators are called '{name}': {_place(other)} and {_place(generator)}"
            )
        return generator

    return enter


def _place(generator: Callable[..., Schedule]) -> str:
    return f"{generator.__module__}.{generator.__qualname__}"
