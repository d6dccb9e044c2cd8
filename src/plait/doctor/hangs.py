"""The search for the rank that hangs: who waits, for whom, and who is at the end of that.

A rank that waits is not at fault itself. Whoever it waits for has not come to the communication, or
does another one. That leads to a rank that waits for nobody, to two ranks in different
communications, or round in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plait.doctor.record import Communication, RankView

EQUAL_BYTES: Final = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
Views = Mapping[int, RankView]


@dataclass(frozen=True)
class Fault:
    """The rank at fault, the communication that others wait in, and why, if that is known.

    `waiting` are the ranks that wait for it, near or far.
    """

    rank: int
    place: Communication | None
    why: str | None
    waiting: tuple[int, ...]


def awaited(view: RankView, views: Views) -> tuple[int, ...]:
    """The ranks that a rank waits for: those that have not come to its communication."""
    mine = view.current
    if not view.waits or mine is None:
        return ()
    if not mine.is_collective:
        return _awaited_peer(view, mine, views)
    others = [rank for rank in mine.ranks if rank != view.rank]
    late = [rank for rank in others if rank not in views or _reached(views[rank], mine) is None]
    return tuple(late or [rank for rank in others if not _is_through(views[rank], mine)])


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
        odd = [rank for rank in path if _deviates(views[rank])]
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
        kinds = Counter(_kind(one) for one in met.values())
        if len(kinds) > 1:
            return _odd_one(views, mine, met, kinds)
    return None


def _odd_one(
    views: Views,
    mine: Communication,
    met: Mapping[int, Communication],
    kinds: Counter[tuple[str, int]],
) -> Fault:
    most = max(kinds.values())
    odd = [rank for rank, one in met.items() if kinds[_kind(one)] < most]
    if not odd:
        odd = [rank for rank in met if _deviates(views[rank])] or [max(met)]
    rank = odd[0]
    other = next(one for one in met.values() if _kind(one) != _kind(met[rank]))
    own = met[rank]
    if own.op == other.op:
        why = f"mismatched size: {own.bytes} bytes where others have {other.bytes}"
    else:
        why = f"skipped a communication: it is in {own.op} where others are in {other.op}"
    waiting = tuple(one for one in sorted(met) if one != rank)
    return Fault(rank, other, why, waiting)


def _kind(one: Communication) -> tuple[str, int]:
    return one.op, one.bytes if one.op in EQUAL_BYTES else 0


def _reached(view: RankView, mine: Communication) -> Communication | None:
    """The communication of that number on the same ranks; None where the rank has not begun it.

    Where the record does not reach back so far, it counts as equal.
    """
    found = None
    for one in reversed(view.entries):
        if one.is_collective and one.axis == mine.axis and one.ranks == mine.ranks:
            if one.number == mine.number:
                return one
            if one.number < mine.number:
                break
            found = one
    return None if found is None else mine


def _is_through(view: RankView, mine: Communication) -> bool:
    """Whether a rank has ended the communication, or waits in it too."""
    theirs = _reached(view, mine)
    if theirs is None:
        return False
    current = view.current
    inside = current is not None and current.axis == mine.axis and current.number >= mine.number
    return theirs.ended > 0 or (view.waits and inside)


def _awaited_peer(view: RankView, mine: Communication, views: Views) -> tuple[int, ...]:
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


def _deviates(view: RankView) -> bool:
    """Whether the communications of the step under way are not those that the step before began
    with.
    """
    if len(view.steps) < 2:
        return False
    began, ended = view.steps[-2].ended, view.steps[-1].ended
    before = [_word(one) for one in view.entries if began <= one.issued < ended]
    now = [_word(one) for one in view.entries if one.issued >= ended]
    if not before or view.entries[0].issued > began:
        return False
    return now != before[: len(now)]


def _word(one: Communication) -> tuple[str, str, int, int]:
    return one.axis, one.op, one.peer, one.bytes if one.op in EQUAL_BYTES else 0
