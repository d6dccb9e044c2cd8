"""The pipeline of a plan in time and in live activations, from the very schedule that would run.

The action lists are translated once into integers, in an order that respects every dependency. Then
they are replayed with the costs at hand. A schedule is periodic between filling and draining, so
many micro-batches are replayed as few plus whole periods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from plait.parallel.pipeline.actions import Action, Kind, Schedule
from plait.parallel.pipeline.clock import needs, run_lists

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = range(4)
_CODES = {
    Kind.FORWARD: FORWARD,
    Kind.BACKWARD: BACKWARD,
    Kind.INPUT_GRAD: INPUT_GRAD,
    Kind.WEIGHT_GRAD: WEIGHT_GRAD,
}


@dataclass(frozen=True)
class StageSeconds:
    """One micro-batch on one stage: compute with the communication that it cannot hide, and the
    send to a neighbour.
    """

    forward: float
    input_grad: float
    weight_grad: float
    send: float = 0.0

    @property
    def backward(self) -> float:
        """Seconds of the whole backward: input gradients and weight gradients."""
        return self.input_grad + self.weight_grad

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def stretched(self, times: float) -> StageSeconds:
        """This stage on a slower core: compute takes `times` as long, the send as before."""
        return StageSeconds(
            times * self.forward, times * self.input_grad, times * self.weight_grad, self.send
        )


NO_PRODUCER = -1

ReplayEvent = tuple[int, int, int, int, bool]
"""Rank, code, stage, producer, and whether the producer is on another rank.

The producer is the index of the event on another stage that this one waits for, or `NO_PRODUCER`.
Inputs from the own stage come earlier in the rank's list.
"""


@dataclass(frozen=True)
class ScheduleReplay:
    """A schedule as integers, every producer before its consumers."""

    num_ranks: int
    num_stages: int
    placement: tuple[int, ...]
    events: tuple[ReplayEvent, ...]
    peaks: tuple[int, ...]
    """Live micro-batches of each stage at the moment when its rank holds most."""


@dataclass(frozen=True)
class PipelineTime:
    """The step of a pipeline: when the last rank ends, when each rank ends, and each rank's share
    of work.
    """

    seconds: float
    rank_ends: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle part of all ranks' time, (seconds - busy) / seconds on average."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def pipeline_time(
    name: str, num_ranks: int, num_micro_batches: int, stages: Sequence[StageSeconds]
) -> PipelineTime:
    """The step of a schedule whose stages cost `stages`; `len(stages)` is num_ranks times the
    stages of a rank.
    """
    virtual = len(stages) // num_ranks
    if num_ranks == 1:
        busy = num_micro_batches * sum(stage.total for stage in stages)
        return PipelineTime(busy, (busy,), (busy,))
    few = _few(num_ranks, num_micro_batches)
    time = _run(name, num_ranks, few, virtual, stages)
    if few == num_micro_batches:
        return time
    # Whole periods of num_ranks micro-batches, each as long as the last one that was replayed.
    less = _run(name, num_ranks, few - num_ranks, virtual, stages)
    more = (num_micro_batches - few) / num_ranks
    each = [b - a for a, b in zip(less.busy, time.busy, strict=True)]
    least = max(each)  # ranks that run ahead of others cannot do so for ever
    return PipelineTime(
        time.seconds + more * max(least, time.seconds - less.seconds),
        tuple(
            b + more * max(least, b - a)
            for a, b in zip(less.rank_ends, time.rank_ends, strict=True)
        ),
        tuple(b + more * more_busy for b, more_busy in zip(time.busy, each, strict=True)),
    )


def live_micro_batches(
    name: str, num_ranks: int, num_micro_batches: int, virtual: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Live micro-batches of each stage at its rank's peak, and the rank of each stage."""
    if num_ranks == 1:
        return (1,) * virtual, (0,) * virtual
    replay = compiled(name, num_ranks, _few(num_ranks, num_micro_batches), virtual)
    return replay.peaks, replay.placement


def _few(num_ranks: int, num_micro_batches: int) -> int:
    """At most three fillings of the pipeline, congruent to the real number so that whole periods
    remain.
    """
    limit = 3 * num_ranks
    if num_micro_batches <= limit:
        return num_micro_batches
    return limit + (num_micro_batches - limit) % num_ranks


def _run(
    name: str, num_ranks: int, micro_batches: int, virtual: int, stages: Sequence[StageSeconds]
) -> PipelineTime:
    replay = compiled(name, num_ranks, micro_batches, virtual)
    durations = _durations(stages)
    sends = [s.send for s in stages]
    clocks = [0.0] * num_ranks
    busy = [0.0] * num_ranks
    ends: list[float] = []
    for rank, code, stage, producer, crosses in replay.events:
        start = clocks[rank]
        if producer != NO_PRODUCER:
            ready = ends[producer] + (sends[stage] if crosses else 0.0)
            start = max(start, ready)
        seconds = durations[code][stage]
        end = start + seconds
        clocks[rank] = end
        busy[rank] += seconds
        ends.append(end)
    return PipelineTime(max(clocks), tuple(clocks), tuple(busy))


def _durations(stages: Sequence[StageSeconds]) -> list[list[float]]:
    """Seconds of a stage in each kind of action: `[FORWARD][stage]` and so on."""
    return [
        [stage.forward for stage in stages],
        [stage.backward for stage in stages],
        [stage.input_grad for stage in stages],
        [stage.weight_grad for stage in stages],
    ]


def crowded_seconds(
    name: str, num_ranks: int, micro_batches: int, stages: Sequence[StageSeconds], cores: int
) -> float:
    """The step of a schedule whose ranks share fewer `cores`. A rank that could go on waits for a
    core, the earliest first.
    """
    replay = compiled(name, num_ranks, micro_batches, len(stages) // num_ranks)
    durations = _durations(stages)
    queues: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, (rank, *_) in enumerate(replay.events):
        queues[rank].append(index)
    ends: dict[int, float] = {}
    clocks = [0.0] * num_ranks
    free = [0.0] * cores
    heads = [0] * num_ranks
    for _ in replay.events:
        ready = []
        for rank, queue in enumerate(queues):
            if heads[rank] == len(queue):
                continue
            _, _, stage, producer, crosses = replay.events[queue[heads[rank]]]
            if producer == NO_PRODUCER:
                ready.append((clocks[rank], rank))
            elif producer in ends:
                arrival = ends[producer] + (stages[stage].send if crosses else 0.0)
                ready.append((max(clocks[rank], arrival), rank))
        start, rank = min(ready)
        core = free.index(min(free))
        index = queues[rank][heads[rank]]
        _, code, stage, *_ = replay.events[index]
        ends[index] = clocks[rank] = free[core] = max(start, free[core]) + durations[code][stage]
        heads[rank] += 1
    return max(clocks)


@lru_cache(maxsize=512)
def compiled(name: str, num_ranks: int, num_micro_batches: int, virtual: int) -> ScheduleReplay:
    """The lists of a schedule as integers, in an order in which every producer comes first."""
    from plait.parallel.pipeline.schedules import make

    return translate(make(name, num_ranks, num_micro_batches, virtual))


def translate(schedule: Schedule) -> ScheduleReplay:
    """The replay of any schedule; transfers and updates are left out, their cost is not the
    schedule's.
    """
    lists = [[action for action in actions if action.kind in _CODES] for actions in schedule.ranks]
    placement = schedule.placement
    event_of = {kind: [dict[int | None, int]() for _ in placement] for kind in _CODES}
    """The event of each pass that has run, by kind, stage and micro-batch."""
    # A whole backward also gives the input gradient that the stage before waits for.
    event_of[Kind.BACKWARD] = event_of[Kind.INPUT_GRAD]
    events: list[ReplayEvent] = []

    @cache
    def inputs(kind: Kind, stage: int) -> list[tuple[dict[int | None, int], bool, bool]]:
        """Events that a pass may wait for, whether on another stage, and whether across ranks."""
        return [
            (event_of[need][at], at != stage, placement[at] != placement[stage])
            for need, at in needs(kind, stage, schedule.num_stages)
        ]

    def advance(rank: int, index: int, action: Action) -> bool:
        """Append the event of an action; False when one that it needs has not run."""
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        producer, crosses = NO_PRODUCER, False
        for results, is_other, other_rank in inputs(kind, stage):
            event = results.get(micro_batch)
            if event is None:
                return False
            if is_other:
                producer, crosses = event, other_rank
        event_of[kind][stage][micro_batch] = len(events)
        events.append((rank, _CODES[kind], stage, producer, crosses))
        return True

    run_lists(lists, advance)
    return ScheduleReplay(
        len(lists), schedule.num_stages, placement, tuple(events), _peaks(schedule, lists)
    )


def _peaks(schedule: Schedule, lists: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Live micro-batches of each stage where its rank's sum is largest; a split backward frees with
    its weight gradient.
    """
    peaks = [0] * schedule.num_stages
    for actions in lists:
        live: dict[int, int] = {}
        held = most = 0
        at_most = dict[int, int]()
        for action in actions:
            kind = action.kind
            stage = action.stage
            if kind is Kind.FORWARD:
                live[stage] = live.get(stage, 0) + 1
                held += 1
                if held > most:
                    most = held
                    at_most = dict(live)
            elif kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                live[stage] -= 1
                held -= 1
        for stage, count in at_most.items():
            peaks[stage] = count
    return tuple(peaks)
