"""A schedule and what things cost give its timeline, bubble, live activations, weight versions and
staleness.

The records are those of a measured run, so that prediction and measurement are compared line by
line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import COMPUTE, Action, Kind, Schedule
from plait.parallel.pipeline.clock import Event, walk
from plait.parallel.pipeline.weights import LAST_BACKWARD, stage_weights
from plait.trace import Span, Timeline

PerStage = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Seconds of an action on a stage: one number, or one for each stage. The default is the
    literature's equal times.

    `backward_seconds` None means input gradient plus weight gradient. `transfer_seconds` is the
    time from a result's end on one rank until it can be used on another. Both may compute
    meanwhile. `others_seconds` keeps the rank busy (updates, posts).
    """

    forward_seconds: PerStage = 1.0
    input_grad_seconds: PerStage = 1.0
    weight_grad_seconds: PerStage = 1.0
    backward_seconds: PerStage | None = None
    transfer_seconds: float = 0.0
    others_seconds: Mapping[Kind, float] = field(default_factory=dict)

    def seconds(self, action: Action) -> float:
        """How long an action keeps its rank busy."""
        if action.kind is Kind.FORWARD:
            return _of(self.forward_seconds, action.stage)
        if action.kind is Kind.INPUT_GRAD or (
            action.kind is Kind.BACKWARD and self.backward_seconds is None
        ):
            whole = (
                _of(self.weight_grad_seconds, action.stage) if action.kind is Kind.BACKWARD else 0.0
            )
            return _of(self.input_grad_seconds, action.stage) + whole
        if action.kind is Kind.WEIGHT_GRAD:
            return _of(self.weight_grad_seconds, action.stage)
        if action.kind is Kind.BACKWARD and self.backward_seconds is not None:
            return _of(self.backward_seconds, action.stage)
        return self.others_seconds.get(action.kind, 0.0)


def _of(costs: PerStage, stage: int) -> float:
    return costs[stage] if isinstance(costs, tuple) else costs


@dataclass(frozen=True)
class Simulation:
    """The makespan, memory and bubbles of a simulated schedule.

    `makespan_seconds`: from the first start to the last end. `period_seconds`: from one step to the
    next when steps follow each other with no barrier between. It is the longest time that a step
    occupies a rank; the literature's bubbles are of this time. `bubble_fraction` is idle time in
    the period, `barrier_bubble_fraction` in the makespan. Clipping by the global norm is such a
    barrier. Asynchronous schedules have their fractions in the steady state, from a rank's first
    backward to its last forward. Activations are counted in micro-batches: of a stage, and of the
    whole share of a rank.
    """

    timeline: Timeline
    makespan_seconds: float
    period_seconds: float
    bubble_fraction: float
    barrier_bubble_fraction: float
    peak_activations: tuple[int, ...]
    peak_activations_per_rank: tuple[float, ...]
    weight_versions: tuple[int, ...]
    staleness: tuple[int, ...]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run a schedule (lowered or not) on paper. Raises ScheduleError where it cannot run to its
    end.
    """
    costs = costs or Costs()
    walked = walk(schedule, costs.seconds, lambda producer: costs.transfer_seconds)
    if any(
        stopped < len(actions)
        for stopped, actions in zip(walked.stopped, schedule.ranks, strict=True)
    ):
        raise ScheduleError(f"schedule {schedule.name} never ends: verify it first")
    timed = [event for event in walked.events if event.end > event.start]
    by_rank: list[list[Event]] = [[] for _ in range(schedule.num_ranks)]
    for event in timed:
        by_rank[event.rank].append(event)
    makespan = max((event.end for event in timed), default=0.0)
    period = max((events[-1].end - events[0].start for events in by_rank if events), default=0.0)
    busy = sum(event.end - event.start for event in timed)
    idle = _steady_bubble(by_rank) if schedule.asynchronous else None
    weights = stage_weights(schedule)
    return Simulation(
        timeline=_timeline(timed),
        makespan_seconds=makespan,
        period_seconds=period,
        bubble_fraction=_idle(busy, period * schedule.num_ranks) if idle is None else idle,
        barrier_bubble_fraction=_idle(busy, makespan * schedule.num_ranks)
        if idle is None
        else idle,
        peak_activations=peak_activations(schedule),
        peak_activations_per_rank=peak_activations_per_rank(schedule),
        weight_versions=tuple(stage.num_versions for stage in weights),
        staleness=tuple(stage.staleness for stage in weights),
    )


def _idle(busy: float, total: float) -> float:
    return max(0.0, 1.0 - busy / total) if total else 0.0


def _steady_bubble(by_rank: Sequence[Sequence[Event]]) -> float | None:
    """Idle share from every rank's first backward to its last forward; None when a stretch has no
    such part.
    """
    busy = total = 0.0
    for events in by_rank:
        start = next(
            (event.start for event in events if event.action.kind is not Kind.FORWARD), 0.0
        )
        stop = max(
            (event.end for event in events if event.action.kind is Kind.FORWARD), default=0.0
        )
        if stop <= start:
            return None
        busy += sum(
            event.end - event.start
            for event in events
            if event.start >= start and event.end <= stop
        )
        total += stop - start
    return _idle(busy, total)


def _timeline(events: Sequence[Event]) -> Timeline:
    timeline = Timeline(origin_seconds=0.0)
    for event in events:
        action = event.action
        args = {"stage": action.stage, "micro_batch": action.micro_batch}
        timeline.add(
            Span(
                str(action),
                action.kind.value,
                event.rank,
                event.start,
                event.end - event.start,
                args,
            )
        )
    return timeline


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """For every stage the most micro-batches that are between their forward and the end of their
    backward at once.
    """
    peaks = [0] * schedule.num_stages
    for actions in schedule.ranks:
        live = [0] * schedule.num_stages
        for action in actions:
            live[action.stage] += (action.kind is Kind.FORWARD) - (action.kind in LAST_BACKWARD)
            peaks[action.stage] = max(peaks[action.stage], live[action.stage])
    return tuple(peaks)


def peak_activations_per_rank(schedule: Schedule) -> tuple[float, ...]:
    """The peak of live activations over all stages of a rank, in micro-batches of the rank's whole
    share.
    """
    peaks = []
    for rank, actions in enumerate(schedule.ranks):
        live = peak = 0
        for action in actions:
            if action.kind in COMPUTE:
                live += (action.kind is Kind.FORWARD) - (action.kind in LAST_BACKWARD)
                peak = max(peak, live)
        peaks.append(peak / max(1, len(schedule.stages(rank))))
    return tuple(peaks)
