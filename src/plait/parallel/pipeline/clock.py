"""When every action of a schedule starts and ends, each as early as its order and its inputs allow.

One rule says what must have run before a pass (`needs`). One loop runs the lists of all ranks
against each other (`run_lists`). Lowering (order of transfers), verifying (deadlock), simulating
(times), the schedules that are squeezed and the cost model share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from plait.parallel.pipeline.actions import COMPUTE, TRANSFER, Action, Kind, Schedule


@dataclass(frozen=True, slots=True)
class Event:
    """An action with its place and time."""

    action: Action
    rank: int
    index: int  # position in its rank's list
    start: float
    end: float


@dataclass(frozen=True)
class Walk:
    """Events in order of their start, and where each rank stopped (its list's length unless there
    is a deadlock).
    """

    events: tuple[Event, ...]
    stopped: tuple[int, ...]


def unit(action: Action) -> float:
    """The usual convention: forward, input gradient and weight gradient take 1, the whole backward
    2, the rest nothing.
    """
    return {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT_GRAD: 1.0, Kind.WEIGHT_GRAD: 1.0}.get(
        action.kind, 0.0
    )


def no_latency(action: Action) -> float:
    """A result is at the next stage as soon as it exists."""
    return 0.0


@cache
def needs(kind: Kind, stage: int, num_stages: int) -> tuple[tuple[Kind, int], ...]:
    """Passes (kind, stage) of one micro-batch that must have run before a pass of it. A whole
    backward counts as its input gradient.
    """
    if kind is Kind.FORWARD:
        return ((Kind.FORWARD, stage - 1),) if stage > 0 else ()
    if kind is Kind.WEIGHT_GRAD:
        return ((Kind.INPUT_GRAD, stage),)
    if kind not in (Kind.BACKWARD, Kind.INPUT_GRAD):
        return ()
    own = (Kind.FORWARD, stage)
    return (own, (Kind.INPUT_GRAD, stage + 1)) if stage + 1 < num_stages else (own,)


def producers(action: Action, num_stages: int) -> Iterator[Action]:
    """The computing that must precede an action; of `I` and `B` for the same pass only one
    exists.
    """
    for kind, stage in needs(action.kind, action.stage, num_stages):
        yield Action(kind, stage, action.micro_batch)


Item = TypeVar("Item")


def run_lists(
    lists: Sequence[Sequence[Item]], advance: Callable[[int, int, Item], bool]
) -> tuple[int, ...]:
    """Run the lists of all ranks against each other, and say where each stopped. Without a deadlock
    that is its length.

    `advance(rank, index, item)` runs the next item of a rank; False when it must wait.
    """
    position = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, items in enumerate(lists):
            while position[rank] < len(items) and advance(
                rank, position[rank], items[position[rank]]
            ):
                position[rank] += 1
                moved = True
    return tuple(position)


def key(action: Action) -> Action:
    """The name of a result in `producers`: a whole backward gives the input gradient too."""
    return (
        Action(Kind.INPUT_GRAD, action.stage, action.micro_batch)
        if action.kind is Kind.BACKWARD
        else action
    )


SENDS = {Kind.SEND_F: Kind.FORWARD, Kind.SEND_B: Kind.INPUT_GRAD}


def walk(
    schedule: Schedule,
    seconds: Callable[[Action], float] = unit,
    latency: Callable[[Action], float] = no_latency,
) -> Walk:
    """Run the lists against each other; `latency(producer)` passes between ranks, and keeps neither
    of them busy.

    Where a list has transfers a result leaves its rank with its send, else as soon as it exists. A
    list whose next action never gets its inputs stops there.
    """
    lowered = any(action.kind in TRANSFER for action in schedule)
    ends: dict[Action, float] = {}
    left: dict[Action, float] = {}  # when a result left its rank
    clocks = [0.0] * schedule.num_ranks
    events: list[Event] = []

    def arrival(need: Action, rank: int) -> float | None:
        if need.stage < schedule.num_stages and schedule.placement[need.stage] == rank:
            return ends.get(need)
        at = (left if lowered else ends).get(need)
        return None if at is None else at + latency(need)

    def advance(rank: int, index: int, action: Action) -> bool:
        """Execute an action; False when it must wait."""
        arrivals = [arrival(need, rank) for need in producers(action, schedule.num_stages)]
        if any(at is None for at in arrivals):
            return False
        start = max([clocks[rank], *(at for at in arrivals if at is not None)])
        clocks[rank] = start + seconds(action)
        events.append(Event(action, rank, index, start, clocks[rank]))
        if action.kind in COMPUTE:
            ends[key(action)] = clocks[rank]
        elif action.kind in SENDS:
            left[Action(SENDS[action.kind], action.stage, action.micro_batch)] = clocks[rank]
        return True

    stopped = run_lists(schedule.ranks, advance)
    events.sort(key=lambda event: (event.start, event.end, event.rank, event.index))
    return Walk(tuple(events), stopped)
