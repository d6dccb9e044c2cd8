"""Is a schedule right? Every rule is one function that yields what breaks it; the first broken rule
is the error.

Order, completeness, transfers, deadlock and weight versions are decided from the lists alone,
before any process exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import COMPUTE, TRANSFER, Action, Kind, Schedule
from plait.parallel.pipeline.clock import producers, run_lists, walk
from plait.parallel.pipeline.render import grid
from plait.parallel.pipeline.weights import stage_weights

BACKWARDS = (frozenset({Kind.BACKWARD}), frozenset({Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}))


@dataclass(frozen=True)
class ScheduleFault:
    """A fault of a schedule, and its place in a rank's list.

    `index` is None where an action is missing.
    """

    rank: int
    index: int | None
    message: str


def verify(schedule: Schedule) -> None:
    """Raise ScheduleError for the first broken rule, with the grid and the cell marked; lowered
    lists are checked deeper.
    """
    for rule in (
        misplaced,
        incomplete,
        disordered,
        stray_transfers,
        deadlock,
        blocked_transfers,
        wrong_versions,
    ):
        problems = list(rule(schedule))
        if problems:
            raise ScheduleError(describe(schedule, problems))


def describe(schedule: Schedule, problems: list[ScheduleFault]) -> str:
    """Up to five problems, and the grid with the first of them that has a place marked."""
    first = next((problem for problem in problems if problem.index is not None), None)
    lines = [f"schedule {schedule.name}: {problem.message}" for problem in problems[:5]]
    lines += [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
    return "\n".join(
        [
            *lines,
            grid(
                schedule, (first.rank, first.index) if first and first.index is not None else None
            ),
        ]
    )


def _placed(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    return (
        (rank, index, action)
        for rank, actions in enumerate(schedule.ranks)
        for index, action in enumerate(actions)
    )


def misplaced(schedule: Schedule) -> Iterator[ScheduleFault]:
    """Every action is of a stage of its rank and of a micro-batch that exists; computing and
    transfers happen once.
    """
    seen: set[Action] = set()
    for rank, index, action in _placed(schedule):
        if action.stage >= schedule.num_stages:
            yield ScheduleFault(
                rank, index, f"{action} is of stage {action.stage}; there are {schedule.num_stages}"
            )
        elif schedule.placement[action.stage] != rank:
            yield ScheduleFault(
                rank,
                index,
                f"{action} is on rank {rank}; rank {schedule.placement[action.stage]} holds the "
                "stage",
            )
        elif action.micro_batch is not None and action.micro_batch >= schedule.num_micro_batches:
            yield ScheduleFault(
                rank, index, f"{action} is beyond the {schedule.num_micro_batches} micro-batches"
            )
        elif action in seen and action.kind in COMPUTE | TRANSFER:
            yield ScheduleFault(rank, index, f"{action} happens twice")
        seen.add(action)


def incomplete(schedule: Schedule) -> Iterator[ScheduleFault]:
    """Each micro-batch goes forward and backward once through every stage; the backward is B, or I
    and W.
    """
    kinds: dict[tuple[int, int | None], set[Kind]] = {}
    for action in schedule:
        if action.kind in COMPUTE:
            kinds.setdefault((action.stage, action.micro_batch), set()).add(action.kind)
    for stage, rank in enumerate(schedule.placement):
        for micro_batch in range(schedule.num_micro_batches):
            have = kinds.get((stage, micro_batch), set())
            if Kind.FORWARD not in have:
                yield ScheduleFault(rank, None, f"{stage}F{micro_batch} is missing")
            if have - {Kind.FORWARD} not in BACKWARDS:
                counts_found = (
                    " and ".join(sorted(kind.value for kind in have - {Kind.FORWARD})) or "nothing"
                )
                yield ScheduleFault(
                    rank,
                    None,
                    f"stage {stage}, micro-batch {micro_batch}: backward is B, or I and W; found "
                    f"{counts_found}",
                )


def disordered(schedule: Schedule) -> Iterator[ScheduleFault]:
    """On its rank, everything comes after its inputs, and an update after the last gradient."""
    for rank, actions in enumerate(schedule.ranks):
        done: set[Action] = set()
        for index, action in enumerate(actions):
            for need in producers(action, schedule.num_stages):
                if schedule.placement[need.stage] == rank and need not in done:
                    yield ScheduleFault(rank, index, f"{action} comes before {need}")
            done.add(
                Action(Kind.INPUT_GRAD, action.stage, action.micro_batch)
                if action.kind is Kind.BACKWARD
                else action
            )


def _transfers(schedule: Schedule) -> Iterator[tuple[Action, Action, Action]]:
    """The (send, receive, consumer kind's micro-batch and stage as F or I) that a schedule needs
    between its ranks.
    """
    last = schedule.num_stages - 1
    for stage, rank in enumerate(schedule.placement):
        for j in range(schedule.num_micro_batches):
            if stage < last and schedule.placement[stage + 1] != rank:
                yield (
                    Action(Kind.SEND_F, stage, j),
                    Action(Kind.RECV_F, stage + 1, j),
                    Action(Kind.FORWARD, stage + 1, j),
                )
                yield (
                    Action(Kind.SEND_B, stage + 1, j),
                    Action(Kind.RECV_B, stage, j),
                    Action(Kind.INPUT_GRAD, stage, j),
                )


MADE_BY = {Kind.SEND_F: (Kind.FORWARD,), Kind.SEND_B: (Kind.BACKWARD, Kind.INPUT_GRAD)}
USED_BY = {Kind.RECV_F: (Kind.FORWARD,), Kind.RECV_B: (Kind.BACKWARD, Kind.INPUT_GRAD)}


def stray_transfers(schedule: Schedule) -> Iterator[ScheduleFault]:
    """Each send has its receive, after its result and before its use; none is left over."""
    place = {action: (rank, index) for rank, index, action in _placed(schedule)}
    present = {action for action in place if action.kind in TRANSFER}
    if not present:
        return
    needed = list(_transfers(schedule))
    for action in chain.from_iterable((send, receive) for send, receive, _ in needed):
        if action not in present:
            yield ScheduleFault(schedule.placement[action.stage], None, f"{action} is missing")
    for action in present - set(
        chain.from_iterable((send, receive) for send, receive, _ in needed)
    ):
        yield ScheduleFault(*place[action], f"{action} has no counterpart: nothing travels there")
    for action in present:
        rank, index = place[action]
        for kind in MADE_BY.get(action.kind, ()):
            made = place.get(Action(kind, action.stage, action.micro_batch))
            if made is not None and made[1] > index:
                yield ScheduleFault(
                    rank,
                    index,
                    f"{action} comes before {action.stage}{kind.value}{action.micro_batch}",
                )
        for kind in USED_BY.get(action.kind, ()):
            used = place.get(Action(kind, action.stage, action.micro_batch))
            if used is not None and used[1] < index:
                yield ScheduleFault(
                    rank,
                    index,
                    f"{action} comes after {action.stage}{kind.value}{action.micro_batch}",
                )


def deadlock(schedule: Schedule) -> Iterator[ScheduleFault]:
    """The lists run to their ends when sends do not block."""
    for rank, stopped in enumerate(walk(schedule).stopped):
        if stopped < len(schedule.ranks[rank]):
            action = schedule.ranks[rank][stopped]
            needs = ", ".join(str(need) for need in producers(action, schedule.num_stages))
            yield ScheduleFault(
                rank,
                stopped,
                f"deadlock: rank {rank} waits at {action} for {needs}, which never comes",
            )


def _transfers_of(actions: Iterable[Action]) -> list[tuple[int, Action]]:
    """The transfers of one rank, each with its place in the list."""
    return [(index, action) for index, action in enumerate(actions) if action.kind in TRANSFER]


def blocked_transfers(schedule: Schedule) -> Iterator[ScheduleFault]:
    """The transfers between any two ranks are in the same order on both. They complete even when
    each blocks for the other.
    """
    partner = {send: receive for send, receive, _ in _transfers(schedule)}
    partner |= {receive: send for send, receive in partner.items()}
    lists = [_transfers_of(actions) for actions in schedule.ranks]
    begun: set[Action] = set()

    def advance(rank: int, index: int, item: tuple[int, Action]) -> bool:
        """Begin a transfer; it completes once its rank's peer has begun the other side."""
        begun.add(item[1])
        return partner[item[1]] in begun

    heads = run_lists(lists, advance)
    for rank, transfers in enumerate(lists):
        if heads[rank] < len(transfers):
            index, action = transfers[heads[rank]]
            yield ScheduleFault(
                rank,
                index,
                f"deadlock where transfers block: rank {rank} is at {action}, no rank at "
                f"{partner[action]}",
            )


def wrong_versions(schedule: Schedule) -> Iterator[ScheduleFault]:
    """Updates are as declared: every gradient is in one, and a delayed forward finds its version
    there already.
    """
    counts = Counter(action.stage for action in schedule if action.kind is Kind.UPDATE)
    if not counts:
        return
    weights = stage_weights(schedule)
    for stage, rank in enumerate(schedule.placement):
        newest = 0
        for index, action in enumerate(schedule.ranks[rank]):
            if action.stage != stage or action.micro_batch is None:
                newest += action == Action(Kind.UPDATE, stage)
            elif action.kind is Kind.FORWARD and weights[stage].seen[action.micro_batch] > newest:
                version = weights[stage].seen[action.micro_batch]
                yield ScheduleFault(
                    rank, index, f"{action} needs weights {version}, of which {newest} are made"
                )
            elif (
                action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
                and weights[stage].applied[action.micro_batch] >= counts[stage]
            ):
                yield ScheduleFault(rank, index, f"no update of stage {stage} follows {action}")
            elif (
                not schedule.asynchronous
                and action.kind is Kind.FORWARD
                and weights[stage].applied[action.micro_batch] > newest
            ):
                yield ScheduleFault(
                    rank,
                    index,
                    f"an update of stage {stage} stands between {action} and its backward",
                )
        groups = weights[0].applied, weights[stage].applied
        if schedule.delay is not None and groups[0] != groups[1]:
            yield ScheduleFault(
                rank, None, f"stages 0 and {stage} gather different micro-batches for an update"
            )
