"""Cut a stream of steps into what each step executes, for schedules that do not drain between
steps.

A rank's part of a step ends where the first forward of the next step's batch would begin. Whatever
such a part needs is in the parts up to it. Transfers keep one order, and everything of the next
batch follows from its forwards.
"""

from __future__ import annotations

from dataclasses import replace

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import Action, Kind, Schedule


def split_steps(schedule: Schedule) -> tuple[Schedule, ...]:
    """One part a step; joined they are the schedule again. The first fills the pipeline, the last
    also drains it.
    """
    size = schedule.num_micro_batches // schedule.num_steps
    parts = [_cut(actions, size, schedule.num_steps) for actions in schedule.ranks]
    return tuple(schedule.with_ranks(ranks) for ranks in zip(*parts, strict=True))


def _cut(actions: tuple[Action, ...], size: int, num_steps: int) -> list[tuple[Action, ...]]:
    firsts = {step * size: step for step in range(1, num_steps)}
    cuts = [0]
    for index, action in enumerate(actions):
        if (
            action.kind is Kind.FORWARD
            and action.micro_batch in firsts
            and firsts[action.micro_batch] == len(cuts)
        ):
            cuts.append(index)
    if len(cuts) != num_steps:
        raise ScheduleError(
            f"{num_steps} steps of {size} micro-batches do not start in order on every rank"
        )
    return [
        actions[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(actions)], strict=True)
    ]


def shifted(action: Action, micro_batches: int) -> Action:
    """An action, moved to a later (or earlier) micro-batch.

    The steady step is one list, shifted by m each time.
    """
    return (
        action
        if action.micro_batch is None
        else replace(action, micro_batch=action.micro_batch + micro_batches)
    )
