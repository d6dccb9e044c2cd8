"""Passes from a schedule of computing to the list that a runtime obeys; each is pure, list to list.

`lower` applies them in their order: update and reduce, send and receive, unshard.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from plait.parallel.pipeline.actions import COMPUTE, TRANSFER, Action, Kind, Schedule, update
from plait.parallel.pipeline.clock import Event, walk

RECEIVES = (Kind.RECV_F, Kind.RECV_B)
WEIGHT_GRADS = (Kind.BACKWARD, Kind.WEIGHT_GRAD)


def lower(schedule: Schedule, max_unsharded: int | None = None) -> Schedule:
    """All passes; what a schedule says of itself already stays as it is.

    `max_unsharded` limits the stages of a rank whose whole weights are in memory (None: no limit).
    """
    has = {action.kind for action in schedule}
    schedule = add_update(schedule)
    schedule = schedule if Kind.REDUCE in has else add_reduce(schedule)
    schedule = schedule if has & TRANSFER else add_send_recv(schedule)
    return schedule if Kind.UNSHARD in has else add_unshard(schedule, max_unsharded)


def group_weight_grads(schedule: Schedule, size: int) -> Schedule:
    """Put off weight gradients until `size` of a stage stand together, which the runtime then makes
    as one.

    They wait for none and none waits for them, so no order is broken; `size` - 1 more
    micro-batches of a stage live.
    """

    def grouped(actions: Sequence[Action]) -> list[Action]:
        result: list[Action] = []
        waiting: dict[int, list[Action]] = {}
        for action in actions:
            if action.kind is Kind.WEIGHT_GRAD:
                group = waiting.setdefault(action.stage, [])
                group.append(action)
                result += waiting.pop(action.stage) if len(group) >= size else ()
                continue
            if action.kind is Kind.UPDATE:
                result += waiting.pop(action.stage, ())
            result.append(action)
        return [*result, *(action for group in waiting.values() for action in group)]

    return (
        schedule.with_ranks([grouped(actions) for actions in schedule.ranks])
        if size > 1
        else schedule
    )


def joined_weight_grads(actions: Sequence[Action]) -> frozenset[Action]:
    """The weight gradients right before another of their stage: made with that one."""
    passes = [action for action in actions if action.kind is not Kind.REDUCE]
    return frozenset(
        action
        for action, following in pairwise(passes)
        if action.kind is following.kind is Kind.WEIGHT_GRAD and action.stage == following.stage
    )


def add_update(schedule: Schedule) -> Schedule:
    """End the list of a stage that has no update by one: the flush. All of a rank's flush updates
    stand at its end.
    """

    def flushed(rank: int, actions: Sequence[Action]) -> list[Action]:
        updated = {action.stage for action in actions if action.kind is Kind.UPDATE}
        return [
            *actions,
            *(update(stage) for stage in schedule.stages(rank) if stage not in updated),
        ]

    return schedule.with_ranks(
        [flushed(rank, actions) for rank, actions in enumerate(schedule.ranks)]
    )


def add_reduce(schedule: Schedule) -> Schedule:
    """Arm the reduction before the last weight gradient of a stage ahead of each of its updates."""

    def armed(actions: Sequence[Action]) -> list[Action]:
        waiting: set[int] = set()  # stages whose update was met, walking from the end
        result: list[Action] = []
        for action in reversed(actions):
            result.append(action)
            if action.kind is Kind.UPDATE:
                waiting.add(action.stage)
            elif action.kind in WEIGHT_GRADS and action.stage in waiting:
                waiting.remove(action.stage)
                result.append(Action(Kind.REDUCE, action.stage))
        return result[::-1]

    return schedule.with_ranks([armed(actions) for actions in schedule.ranks])


def add_send_recv(schedule: Schedule) -> Schedule:
    """Insert the transfers between stages on different ranks.

    A send follows its computing at once. All transfers of the pipeline are put in one order, that
    of their results in time. Every rank keeps that order, and within it posts each receive as early
    as possible. Hence no deadlock even where a send blocks until its receive. Whatever precedes the
    earliest unfinished transfer is finished on both sides.
    """
    before: list[dict[int, list[Action]]] = [{} for _ in schedule.ranks]
    after: list[dict[int, list[Action]]] = [{} for _ in schedule.ranks]
    frontier = [
        0
    ] * schedule.num_ranks  # where a receive may stand, given the transfers placed so far
    for event in sorted(
        walk(schedule).events, key=lambda event: (event.end, event.rank, event.index)
    ):
        pair = _transfer(event, schedule)
        if pair is None:
            continue
        send, receive, peer = pair
        after[event.rank].setdefault(event.index, []).append(send)
        frontier[event.rank] = event.index + 1
        before[peer].setdefault(frontier[peer], []).append(receive)

    def merged(rank: int, actions: Sequence[Action]) -> list[Action]:
        result: list[Action] = []
        for index in range(len(actions) + 1):
            result += before[rank].get(index, ())
            if index < len(actions):
                result += [actions[index], *after[rank].get(index, ())]
        return result

    return schedule.with_ranks(
        [merged(rank, actions) for rank, actions in enumerate(schedule.ranks)]
    )


def _transfer(event: Event, schedule: Schedule) -> tuple[Action, Action, int] | None:
    """The send and receive that carry an event's result, and the receiving rank; None where nothing
    leaves the rank.
    """
    action = event.action
    if action.kind not in COMPUTE or action.kind is Kind.WEIGHT_GRAD:
        return None
    forward = action.kind is Kind.FORWARD
    target = action.stage + (1 if forward else -1)
    if not 0 <= target < schedule.num_stages or schedule.placement[target] == event.rank:
        return None
    send = Action(Kind.SEND_F if forward else Kind.SEND_B, action.stage, action.micro_batch)
    receive = Action(Kind.RECV_F if forward else Kind.RECV_B, target, action.micro_batch)
    return send, receive, schedule.placement[target]


def add_unshard(schedule: Schedule, max_unsharded: int | None = None) -> Schedule:
    """Gather a stage's weights before their first use, and again after an update that they outlive.

    Beyond `max_unsharded` stages the one whose next use is farthest is resharded first.
    """

    def gathered(actions: Sequence[Action]) -> list[Action]:
        whole: set[int] = set()
        result: list[Action] = []
        for index, action in enumerate(actions):
            if action.kind in COMPUTE and action.stage not in whole:
                change = [Action(Kind.UNSHARD, action.stage)]
                if max_unsharded is not None and len(whole) >= max_unsharded:
                    farthest = max(whole, key=lambda stage: _next_use(actions, stage, index))
                    whole.remove(farthest)
                    change.insert(0, Action(Kind.RESHARD, farthest))
                whole.add(action.stage)
                at = len(result)
                while at and result[at - 1].kind in RECEIVES:  # gather while the inputs travel
                    at -= 1
                result[at:at] = change
            elif action.kind is Kind.UPDATE:
                whole.discard(action.stage)
            result.append(action)
        return result

    return schedule.with_ranks([gathered(actions) for actions in schedule.ranks])


def _next_use(actions: Sequence[Action], stage: int, start: int) -> int:
    uses = (
        index
        for index in range(start, len(actions))
        if actions[index].stage == stage and actions[index].kind in COMPUTE
    )
    return next(uses, len(actions))


def strip(schedule: Schedule) -> Schedule:
    """Back to computing and updates: the inverse of the passes but for flush updates."""
    keep = COMPUTE | {Kind.UPDATE}
    return schedule.with_ranks(
        [[action for action in actions if action.kind in keep] for actions in schedule.ranks]
    )
