"""Every schedule by its name in the plan grammar, each written once as a short generator.

A new one is a module here whose function says `@generates(name)`, and the row of that name in
`plait.plan.facts`. `make` is the entry. A user's own schedule is a `Family` in the table that
`make` is given, or a text file (`plait.parallel.pipeline.text`). It is verified before it is
returned.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from plait.errors import ScheduleError, nearest
from plait.parallel.pipeline.actions import Action, Schedule
from plait.parallel.pipeline.lower import add_update
from plait.parallel.pipeline.schedules.registry import GENERATORS
from plait.parallel.pipeline.steps import shifted
from plait.parallel.pipeline.verify import verify
from plait.plan import facts
from plait.plan.facts import ScheduleFacts, broken_shape


@dataclass(frozen=True)
class Family:
    """A generator and the facts of its schedule.

    It is called with (p, m), with a third argument `virtual` where the facts need one, or
    `num_steps` where asynchronous.
    """

    generate: Callable[..., Schedule]
    facts: ScheduleFacts = field(default_factory=ScheduleFacts)


def _families() -> dict[str, Family]:
    """A family for each row of the facts, by the generators of all modules here."""
    for found in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(found.name)
    unpaired = sorted(GENERATORS.keys() ^ facts.SCHEDULES.keys())
    if unpaired:
        raise ScheduleError(
            f"a schedule is a generator and a row in plait/plan/facts.py: {', '.join(unpaired)} "
            "has one of them only"
        )
    return {name: Family(GENERATORS[name], row) for name, row in facts.SCHEDULES.items()}


SCHEDULES: Mapping[str, Family] = MappingProxyType(_families())

MOST_ACTIONS = 3_000_000
"""Actions of a step in one list: some ten seconds of work, and ten times what a large run has."""


def make(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    virtual: int = 0,
    *,
    num_steps: int = 1,
    known: Mapping[str, Family] = SCHEDULES,
) -> Schedule:
    """The schedule of that name for p ranks, m micro-batches a step, `virtual` stages a rank and
    some steps. `virtual` 0, and 1 for a V, mean as many as the schedule has by itself.

    A family that is not plait's own is verified. Raises ScheduleError: an unknown name, a number
    below 1, too few micro-batches, a number of stages that does not fit.
    """
    if name not in known:
        raise ScheduleError(f"no schedule is called '{name}'; {nearest(name, known)}")
    family = known[name]
    if virtual == 0 or (virtual == 1 and family.facts.is_vee):
        virtual = family.facts.default_virtual
    check_shape(name, num_ranks, num_micro_batches, virtual, known)
    if num_steps < 1:
        raise ScheduleError(f"{name}: {num_steps} steps; at least 1 is needed")
    if family.facts.asynchronous:
        schedule = family.generate(num_ranks, num_micro_batches, num_steps)
    else:
        more = (virtual,) if family.facts.needs_virtual else ()
        schedule = repeat(family.generate(num_ranks, num_micro_batches, *more), num_steps)
    if SCHEDULES.get(name) is not family:
        verify(schedule)
    return schedule


def check_shape(
    name: str, p: int, m: int, virtual: int, known: Mapping[str, Family] = SCHEDULES
) -> None:
    """Raises ScheduleError unless `make` can list a schedule of p ranks and m micro-batches."""
    broken = broken_shape(name, known[name].facts, (p, virtual, m))
    if broken is not None:
        raise ScheduleError(broken)
    if 3 * p * virtual * m > MOST_ACTIONS:
        raise ScheduleError(
            f"{name} on {p} ranks with {m} micro-batches has millions of actions, and at most "
            f"{MOST_ACTIONS:,} are listed (3 a stage and micro-batch); take fewer micro-batches"
        )


def adopt(schedule: Schedule, num_ranks: int, num_micro_batches: int) -> Schedule:
    """A schedule from outside, verified, for a run of p ranks and m micro-batches a step.

    Raises ScheduleError where it is wrong, of another shape, several steps long, or updates weights
    before the end.
    """
    verify(schedule)
    p = schedule.num_ranks
    m = schedule.num_micro_batches
    name = schedule.name
    if (p, m) != (num_ranks, num_micro_batches):
        raise ScheduleError(
            f"schedule {name} is of {p} ranks and {m} micro-batches, the plan of {num_ranks} and "
            f"{num_micro_batches}; "
            f"say pp{p} mb{m} in the plan, or write the schedule for the plan"
        )
    if schedule.asynchronous or schedule.delay is not None or schedule.num_steps > 1:
        raise ScheduleError(
            f"schedule {name} is asynchronous or several steps long; a run repeats one step that "
            "ends with its update. Steps "
            "that overlap are those of pipedream and 2bw"
        )
    return schedule


def stages_per_rank(name: str, virtual: int = 1, known: Mapping[str, Family] = SCHEDULES) -> int:
    """How many stages a rank holds under a named schedule.

    Raises:
        ScheduleError: no schedule has that name.
    """
    if name not in known:
        raise ScheduleError(f"no schedule is called '{name}'; {nearest(name, known)}")
    return known[name].facts.stages_per_rank or virtual


def repeat(schedule: Schedule, num_steps: int) -> Schedule:
    """`num_steps` steps of a flush schedule, one after the other, each with its update; one step is
    the schedule itself.
    """
    if num_steps == 1:
        return schedule
    m = schedule.num_micro_batches

    def repeated(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(shifted(action, step * m) for step in range(num_steps) for action in actions)

    ranks = tuple(repeated(actions) for actions in add_update(schedule).ranks)
    return replace(schedule, ranks=ranks, num_micro_batches=m * num_steps, num_steps=num_steps)
