"""The search for the rank that hangs: who waits, for whom, and who is at the end of that.

A rank that waits is not at fault itself. The rank that it waits for has not come to the
communication, or does another one. That leads to a rank that waits
for none, to two ranks in different communications, or round in a circle.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plait.doctor.record import Communication, RankSnapshot

EQUAL_BYTES: Final = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
Views = Mapping[int, RankSnapshot]


@dataclass(frozen=True)
class Fault:
    """The rank at fault, the communication that others wait in, and why, if that is known.

    `waiting` are the ranks that wait for it, near or far.
    """

    rank: int
    place: Communication | None
    why: str | None
    waiting: tuple[int, ...]


def awaited(view: RankSnapshot, views: Views) -> tuple[int, ...]:
    """The ranks that a rank waits for: those that have not come to its communication."""
    current = view.current
    if not view.waits or current is None:
        return ()
    if not current.is_collective:
        return _awaited_peer(view, current, views)
    others = [rank for rank in current.ranks if rank != view.rank]
    late = [rank for rank in others if rank not in views or _reached(views[rank], current) is None]
    return tuple(late or [rank for rank in others if not _is_through(views[rank], current)])


def at_fault(views: Views, idle: Sequence[int], frozen: Sequence[int] = ()) -> Fault | None:
    """The fault behind ranks that have not moved for too long; None where they wait for a rank
    that moves. `frozen` are those whose process does not run, or not its interpreter.
    """
    for rank in frozen:
        if rank in idle:
            waiting = tuple(one for one in sorted(idle) if one != rank and views[one].waits)
            place = views[waiting[0]].current if waiting else views[rank].current
            return Fault(rank, place, None, waiting)
    different = unequal(views, idle)
    if different is not None:
        return different
    for rank in sorted(idle):
        end, path = _followed(views, rank)
        if end in idle:
            return _judged(views, end, path, idle)
    return None


def _judged(views: Views, end: int, path: Sequence[int], idle: Sequence[int]) -> Fault:
    place = next((views[rank].current for rank in reversed(path) if views[rank].waits), None)
    waiting = tuple(rank for rank in sorted(idle) if rank != end and views[rank].waits)
    why = None
    if views[end].waits and not awaited(views[end], views):
        why = "link: all its ranks are in this communication, and it does not end"
    elif views[end].waits:  # a circle
        odd = _deviants(views, path, {})
        end = odd[0] if odd else end
        waiting = tuple(rank for rank in sorted(idle) if rank != end)
        why = "skipped a communication" if odd else "ranks wait for one another"
    return Fault(end, place, why, waiting)


def _followed(views: Views, rank: int) -> tuple[int, list[int]]:
    """The end of the chain of those that wait for one another, and the way there.

    In a circle the end is the rank that closes it.
    """
    path = [rank]
    while True:
        following = [one for one in awaited(views[path[-1]], views) if one != path[-1]]
        if not following:
            return path[-1], path
        stuck = min(following, key=lambda one: _freedom(views, one))
        if stuck in path or stuck not in views:
            return stuck, path
        path.append(stuck)


def _freedom(views: Views, rank: int) -> tuple[bool, bool, float]:
    """A key that sorts ranks that wait themselves behind those that do not."""
    if rank not in views:
        return True, True, 0.0
    return False, views[rank].waits, views[rank].moved


def unequal(views: Views, idle: Sequence[int]) -> Fault | None:
    """The fault of ranks whose communications of one number are not one communication."""
    for rank in sorted(idle):
        mine = views[rank].current
        if not views[rank].waits or mine is None or not mine.is_collective:
            continue
        met = {rank: mine}
        for other in mine.ranks:
            theirs = _reached(views[other], mine) if other in views else None
            if theirs is not None:
                met[other] = theirs
        if len(_kinds(met)) > 1:
            return _odd_one(views, met)
    return None


def first_difference(views: Views) -> Fault | None:
    """The fault of the first communication that was not one, whatever the ranks do since."""
    met: dict[tuple[str, tuple[int, ...], int], dict[int, Communication]] = {}
    for rank, view in views.items():
        for one in view.entries:
            if one.is_collective:
                met.setdefault((one.axis, one.ranks, one.number), {})[rank] = one
    different = [ranks for ranks in met.values() if len(_kinds(ranks)) > 1]
    if not different:
        return None
    return _odd_one(views, min(different, key=_began))


def _began(met: Mapping[int, Communication]) -> float:
    return min(one.issued for one in met.values())


def _kinds(met: Mapping[int, Communication]) -> Counter[tuple[str, int]]:
    return Counter(_kind(one) for one in met.values())


def _odd_one(views: Views, met: Mapping[int, Communication]) -> Fault:
    kinds = _kinds(met)
    most = max(kinds.values())
    odd = [rank for rank, one in met.items() if kinds[_kind(one)] < most]
    if not odd:
        until = {rank: one.issued for rank, one in met.items()}
        odd = _deviants(views, met, until) or [max(met)]
    rank = odd[0]
    other = next(one for one in met.values() if _kind(one) != _kind(met[rank]))
    own = met[rank]
    known = {_word(one) for one in views[rank].entries if one.issued < own.issued}
    if own.op == other.op and _word(own) not in known:
        why = f"mismatched size: {own.bytes} bytes where others have {other.bytes}"
    else:
        why = f"skipped a communication: it is in {_size(own)} where others are in {_size(other)}"
    waiting = tuple(one for one in sorted(met) if one != rank)
    return Fault(rank, other, why, waiting)


def _size(one: Communication) -> str:
    return f"{one.op} of {one.bytes} bytes"


def _kind(one: Communication) -> tuple[str, int]:
    return one.op, one.bytes if one.op in EQUAL_BYTES else 0


def _reached(view: RankSnapshot, mine: Communication) -> Communication | None:
    """The communication of that number on the same ranks; None where the rank has not begun it.

    Where the record does not reach back so far, it counts as equal.
    """
    reached = None
    for one in reversed(view.entries):
        if one.is_collective and one.axis == mine.axis and one.ranks == mine.ranks:
            if one.number == mine.number:
                return one
            if one.number < mine.number:
                break
            reached = one
    return None if reached is None else mine


def _is_through(view: RankSnapshot, mine: Communication) -> bool:
    """Whether a rank has ended the communication, or waits in it too."""
    theirs = _reached(view, mine)
    if theirs is None:
        return False
    current = view.current
    inside = current is not None and current.axis == mine.axis and current.number >= mine.number
    return theirs.ended > 0 or (view.waits and inside)


def _awaited_peer(view: RankSnapshot, mine: Communication, views: Views) -> tuple[int, ...]:
    if not 0 <= mine.peer < len(mine.ranks):
        return ()
    peer = mine.ranks[mine.peer]
    if peer not in views:
        return (peer,)
    own = mine.ranks.index(view.rank)
    answer = "send" if mine.op == "receive" else "receive"
    for one in reversed(views[peer].entries):
        matches = one.op == answer and one.axis == mine.axis and one.ranks == mine.ranks
        if matches and one.peer == own and one.number >= mine.number:
            return ()
    return (peer,)


def _deviants(views: Views, ranks: Iterable[int], until: Mapping[int, float]) -> list[int]:
    """The ranks whose communications are not those of their steps before; best, a single one.

    `until` is, by rank, when the last communication began that is looked at.
    """
    known = list(ranks)
    by_step = [rank for rank in known if _deviates(views[rank], until.get(rank, math.inf))]
    if len(by_step) == 1:
        return by_step
    by_pair = [rank for rank in known if _follows_anew(views[rank], until.get(rank, math.inf))]
    return by_pair if len(by_pair) == 1 else by_step


def _deviates(view: RankSnapshot, until: float) -> bool:
    """Whether the communications of the step under way began no step before."""
    ends = [step.ended for step in view.steps]
    if len(ends) < 2:
        return False
    now = [_word(one) for one in view.entries if ends[-1] <= one.issued <= until]
    for began, ended in itertools.pairwise(ends):
        step = [_word(one) for one in view.entries if began <= one.issued < ended]
        if step and now == step[: len(now)]:
            return False
    return True


def _follows_anew(view: RankSnapshot, until: float) -> bool:
    """Whether the last communication has never followed the one before it."""
    words = [_word(one) for one in view.entries if one.issued <= until]
    pairs = list(itertools.pairwise(words))
    return bool(pairs) and pairs[-1] not in pairs[:-1]


def _word(one: Communication) -> tuple[str, str, int, int]:
    return one.axis, one.op, one.peer, one.bytes if one.op in EQUAL_BYTES else 0
