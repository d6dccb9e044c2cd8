"""The times of a run's actions, its bubble, and its schedule simulated with such times.

The bridge between the two timelines of one schedule. Costs come out of a measured one, a simulated
one comes out of costs. Time that an action spends waiting for a message is not its cost: the
simulator makes the waits itself.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import COMPUTE, Action, Kind, Schedule
from plait.parallel.pipeline.clock import walk
from plait.trace import CommEvent, Span, Timeline

StageCosts = Mapping[tuple[Kind, int], float]
"""Seconds by kind and stage."""
ActionCosts = Mapping[Action, float]
"""Seconds of single actions."""
COMPUTING = frozenset(kind.value for kind in COMPUTE)


def working_seconds(step: Timeline) -> list[tuple[Action, int, float]]:
    """(action, rank, seconds without the waits inside) for each span of a timeline that is an
    action.
    """
    by_rank: dict[int, list[CommEvent]] = defaultdict(list)
    for comm in step.comms:
        if comm.exposed_seconds > 0:
            by_rank[comm.rank].append(comm)
    for comms in by_rank.values():
        comms.sort(key=lambda comm: comm.stop_seconds)
    seconds_of = []
    place = dict.fromkeys(by_rank, 0)
    for span in sorted(step.spans, key=lambda span: span.start_seconds):
        waited = 0.0
        comms = by_rank.get(span.rank, [])
        while (
            comms
            and place[span.rank] < len(comms)
            and comms[place[span.rank]].stop_seconds <= span.stop_seconds + 1e-9
        ):
            comm = comms[place[span.rank]]
            waited += comm.exposed_seconds if comm.stop_seconds >= span.start_seconds else 0.0
            place[span.rank] += 1
        seconds_of.append((Action.parse(span.name), span.rank, max(0.0, span.seconds - waited)))
    return seconds_of


def observed_costs(
    steps: Iterable[Timeline], average: Callable[[Sequence[float]], float] = statistics.median
) -> dict[tuple[Kind, int], float]:
    """The median (or another average) time of each kind of action on each stage, over all steps and
    ranks.

    Of weight gradients the mean: where several stand together the last makes them all.
    """
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for step in steps:
        for action, _, seconds in working_seconds(step):
            times[action.kind, action.stage].append(seconds)
    return {
        key: (statistics.fmean if key[0] is Kind.WEIGHT_GRAD else average)(spent)
        for key, spent in times.items()
    }


def observed_bubble(step: Timeline) -> float:
    """The part of a step, from its first start to its last end, in which its ranks do not work."""
    num_ranks = len({span.rank for span in step.spans})
    span = step.seconds
    busy = sum(seconds for _, _, seconds in working_seconds(step))
    return max(0.0, 1.0 - busy / (span * num_ranks)) if span and num_ranks else 0.0


def observed_action_costs(steps: Iterable[Timeline]) -> dict[Action, float]:
    """The median time of each single action over steps of one schedule. It includes effects of the
    action's place in the order.
    """
    times: dict[Action, list[float]] = defaultdict(list)
    for step in steps:
        for action, _, seconds in working_seconds(step):
            times[action].append(seconds)
    return {action: statistics.median(spent) for action, spent in times.items()}


@dataclass(frozen=True)
class Messages:
    """Seconds of transfers between ranks. A transfer is under way while neither rank is busy, and
    then it is taken. The taker waits for the second part always.
    """

    transfer_seconds: float = 0.0
    taking_seconds: float = 0.0


def simulated_step(
    schedule: Schedule,
    costs: StageCosts,
    messages: Messages | None = None,
    own: ActionCosts | None = None,
) -> Timeline:
    """A schedule (lowered, or of computing alone) walked with these costs; what has none takes no
    time.

    `own` are costs of single actions, which go before those of their kind and stage. Raises
    ScheduleError where the schedule never ends.
    """
    messages = messages or Messages()
    single = own or {}

    def cost(action: Action) -> float:
        return single.get(action, costs.get((action.kind, action.stage), 0.0))

    def taking(action: Action) -> float:
        return messages.taking_seconds if takes_message(schedule, action) else 0.0

    walked = walk(
        schedule,
        lambda action: taking(action) + cost(action),
        lambda producer: messages.transfer_seconds,
    )
    if any(
        stopped < len(actions)
        for stopped, actions in zip(walked.stopped, schedule.ranks, strict=True)
    ):
        raise ScheduleError(f"schedule {schedule.name} never ends: verify it first")
    timeline = Timeline(origin_seconds=0.0)
    for event in walked.events:
        action = event.action
        seconds = cost(event.action)
        if seconds:
            args = {"stage": action.stage, "micro_batch": action.micro_batch}
            timeline.add(
                Span(
                    str(action),
                    action.kind.value,
                    event.rank,
                    event.start + taking(action),
                    seconds,
                    args,
                )
            )
    return timeline


def takes_message(schedule: Schedule, action: Action) -> bool:
    """Whether an action begins by taking what another rank has sent."""
    neighbour = {Kind.FORWARD: -1, Kind.BACKWARD: 1, Kind.INPUT_GRAD: 1}.get(action.kind, 0)
    sender = action.stage + neighbour
    return (
        0 <= sender < schedule.num_stages
        and schedule.placement[sender] != schedule.placement[action.stage]
    )


def median_step(steps: Sequence[Timeline]) -> Timeline:
    """The step of median length; of two the shorter."""
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
