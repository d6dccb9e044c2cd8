"""Who is in: meetings of those that are there, newcomers, the lost, the late, and verdicts. Ranks
are threads here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from plait.comm.calls import Address
from plait.comm.membership import RendezvousPlace
from plait.comm.rendezvous import (
    RendezvousClient,
    RendezvousRound,
    RendezvousServer,
    RendezvousState,
)
from plait.errors import RankFailed


class Seats:
    """Attendance whose questions are asked from a thread each. A question has been heard when the
    next one is asked.
    """

    def __init__(self, num_seats: int, patience_seconds: float = 60.0) -> None:
        self.attendance = RendezvousState(num_seats, patience_seconds)
        self._pool = ThreadPoolExecutor(16)

    def __getattr__(self, name: str) -> Callable[..., Future[Any]]:
        return lambda seat, *words: self._ask(name, seat, *words)

    def _ask(self, name: str, seat: int, *words: bool) -> Future[Any]:
        future = self._pool.submit(getattr(self.attendance, name), seat, *words)
        waits = {"meet": self.attendance._come, "agree": self.attendance._said}.get(name, {})
        while not future.done() and seat not in waits:
            time.sleep(0.001)
        return future

    def met(self, *seats: int) -> RendezvousRound:
        """The meeting that all of these get."""
        found = {future.result(20) for future in [self.meet(seat) for seat in seats]}
        assert len(found) == 1
        return found.pop()


def test_all_seats_meet_first_and_then_those_that_are_there() -> None:
    seats = Seats(3)
    early = seats.meet(0)
    assert not early.done()
    assert (
        seats.met(1, 2) == early.result(20) == RendezvousRound(1, (0, 1, 2), frozenset({0, 1, 2}))
    )
    seats.lost(1).result(20)
    assert seats.met(0, 2) == RendezvousRound(2, (0, 2), frozenset())


def test_who_comes_back_is_new_and_waits_for_the_others() -> None:
    seats = Seats(2)
    seats.met(0, 1)
    seats.lost(1).result(20)
    back = seats.meet(1)
    assert not back.done()
    assert seats.meet(0).result(20) == back.result(20) == RendezvousRound(2, (0, 1), frozenset({1}))


@pytest.mark.parametrize("question", ["meet", "agree"])
def test_what_a_lost_seat_waited_for_is_not_taken_from_its_next_life(question: str) -> None:
    seats = Seats(2)
    seats.met(0, 1)
    waiting = seats.agree(1, True) if question == "agree" else seats.meet(1)
    assert not waiting.done()
    seats.lost(1).result(20)
    with pytest.raises(ConnectionError, match="seat 1"):
        waiting.result(20)
    assert seats.meet(0).result(20) == RendezvousRound(2, (0,), frozenset())
    seats.here(1).result(20)
    assert seats.met(0, 1) == RendezvousRound(3, (0, 1), frozenset({1}))


def test_who_has_said_that_it_is_here_is_waited_for() -> None:
    seats = Seats(2)
    seats.met(0, 1)
    seats.lost(1).result(20)
    seats.here(1).result(20)
    waiting = seats.meet(0)
    assert not waiting.done()
    assert seats.meet(1).result(20) == waiting.result(20)


def test_a_meeting_may_be_closed_to_newcomers() -> None:
    seats = Seats(3)
    seats.met(0, 1, 2)
    seats.lost(2).result(20)
    back = seats.meet(2)
    closed = [seats.meet(seat, False) for seat in (0, 1)]
    assert [future.result(20).members for future in closed] == [(0, 1), (0, 1)] and not back.done()
    assert seats.met(0, 1).newcomers == {2} == back.result(20).newcomers


def test_a_death_frees_those_that_wait() -> None:
    seats = Seats(3)
    seats.met(0, 1, 2)
    waiting = [seats.meet(seat) for seat in (0, 2)]
    seats.lost(1).result(20)
    assert {future.result(20).members for future in waiting} == {(0, 2)}
    agreeing = seats.agree(0, True)
    seats.lost(2).result(20)
    assert agreeing.result(20) is True


def test_a_late_one_is_given_up() -> None:
    seats = Seats(2, patience_seconds=0.0)
    assert seats.meet(0).result(20) == RendezvousRound(1, (0,), frozenset({0}))


def test_nobody_is_left_to_learn_from() -> None:
    seats = Seats(2)
    seats.met(0, 1)
    back = seats.meet(1)
    seats.lost(0).result(20)
    seats.lost(1).result(20)
    assert seats.meet(1).result(20) is None
    back.cancel()


def test_one_that_it_went_badly_for_has_all_do_it_again_and_newcomers_stay_new() -> None:
    seats = Seats(3)
    seats.met(0, 1, 2)
    verdicts = [seats.agree(seat, seat != 1) for seat in range(3)]
    assert [future.result(20) for future in verdicts] == [False] * 3
    seats.lost(2).result(20)
    back = seats.meet(2)
    seats.met(0, 1)
    assert back.result(20).newcomers == {2}
    verdicts = [seats.agree(seat, seat != 2) for seat in range(3)]
    assert not any(future.result(20) for future in verdicts)
    assert seats.met(0, 1, 2).newcomers == {2}


def test_over_connections_a_rank_that_ends_is_lost() -> None:
    roster = RendezvousServer(2)
    one, other = (RendezvousClient(roster.address, seat, 2) for seat in range(2))
    with ThreadPoolExecutor(2) as pool:
        met = [
            future.result(20) for future in [pool.submit(member.meet) for member in (one, other)]
        ]
        assert met == [RendezvousRound(1, (0, 1), frozenset({0, 1}))] * 2
        assert [
            f.result(20) for f in [pool.submit(member.agree, True) for member in (one, other)]
        ] == [True, True]
        waiting = pool.submit(one.meet)
        other.close()
        assert waiting.result(20) == RendezvousRound(2, (0,), frozenset())
    one.close()
    late = RendezvousClient(roster.address, 1, 2)
    late.here()
    roster.attendance.lost(0)
    with pytest.raises(RankFailed, match="have ended"):
        late.meet()
    late.close()
    roster.close()


def test_a_place_travels_as_variables() -> None:
    place = RendezvousPlace(1, 4, Address("127.0.0.1", 5, bytes(range(32))), ("localhost", 6))
    assert RendezvousPlace.told(place.as_variables()) == place
    assert RendezvousPlace.told({"RANK": "1", "WORLD_SIZE": "4"}) is None
