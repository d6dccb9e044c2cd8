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


class Workers:
    """Attendance whose questions are asked from a thread each. A question has been heard when the
    next one is asked.
    """

    def __init__(self, num_workers: int, patience_seconds: float = 60.0) -> None:
        self.state = RendezvousState(num_workers, patience_seconds)
        self._pool = ThreadPoolExecutor(16)

    def __getattr__(self, name: str) -> Callable[..., Future[Any]]:
        return lambda worker, *words: self._ask(name, worker, *words)

    def _ask(self, name: str, worker: int, *words: bool) -> Future[Any]:
        future = self._pool.submit(getattr(self.state, name), worker, *words)
        waits = {"meet": self.state._come, "agree": self.state._said}.get(name, {})
        while not future.done() and worker not in waits:
            time.sleep(0.001)
        return future

    def met(self, *workers: int) -> RendezvousRound:
        """The round that all of these get."""
        found = {future.result(20) for future in [self.meet(worker) for worker in workers]}
        assert len(found) == 1
        return found.pop()


def test_all_seats_meet_first_and_then_those_that_are_there() -> None:
    workers = Workers(3)
    early = workers.meet(0)
    assert not early.done()
    assert (
        workers.met(1, 2) == early.result(20) == RendezvousRound(1, (0, 1, 2), frozenset({0, 1, 2}))
    )
    workers.lost(1).result(20)
    assert workers.met(0, 2) == RendezvousRound(2, (0, 2), frozenset())


def test_who_comes_back_is_new_and_waits_for_the_others() -> None:
    workers = Workers(2)
    workers.met(0, 1)
    workers.lost(1).result(20)
    back = workers.meet(1)
    assert not back.done()
    assert (
        workers.meet(0).result(20) == back.result(20) == RendezvousRound(2, (0, 1), frozenset({1}))
    )


@pytest.mark.parametrize("question", ["meet", "agree"])
def test_what_a_lost_seat_waited_for_is_not_taken_from_its_next_life(question: str) -> None:
    workers = Workers(2)
    workers.met(0, 1)
    waiting = workers.agree(1, True) if question == "agree" else workers.meet(1)
    assert not waiting.done()
    workers.lost(1).result(20)
    with pytest.raises(ConnectionError, match="worker 1"):
        waiting.result(20)
    assert workers.meet(0).result(20) == RendezvousRound(2, (0,), frozenset())
    workers.announce(1).result(20)
    assert workers.met(0, 1) == RendezvousRound(3, (0, 1), frozenset({1}))


def test_who_has_said_that_it_is_here_is_waited_for() -> None:
    workers = Workers(2)
    workers.met(0, 1)
    workers.lost(1).result(20)
    workers.announce(1).result(20)
    waiting = workers.meet(0)
    assert not waiting.done()
    assert workers.meet(1).result(20) == waiting.result(20)


def test_a_meeting_may_be_closed_to_newcomers() -> None:
    workers = Workers(3)
    workers.met(0, 1, 2)
    workers.lost(2).result(20)
    back = workers.meet(2)
    closed = [workers.meet(worker, False) for worker in (0, 1)]
    assert [future.result(20).members for future in closed] == [(0, 1), (0, 1)] and not back.done()
    assert workers.met(0, 1).newcomers == {2} == back.result(20).newcomers


def test_a_death_frees_those_that_wait() -> None:
    workers = Workers(3)
    workers.met(0, 1, 2)
    waiting = [workers.meet(worker) for worker in (0, 2)]
    workers.lost(1).result(20)
    assert {future.result(20).members for future in waiting} == {(0, 2)}
    agreeing = workers.agree(0, True)
    workers.lost(2).result(20)
    assert agreeing.result(20) is True


def test_a_late_one_is_given_up() -> None:
    workers = Workers(2, patience_seconds=0.0)
    assert workers.meet(0).result(20) == RendezvousRound(1, (0,), frozenset({0}))


def test_nobody_is_left_to_learn_from() -> None:
    workers = Workers(2)
    workers.met(0, 1)
    back = workers.meet(1)
    workers.lost(0).result(20)
    workers.lost(1).result(20)
    assert workers.meet(1).result(20) is None
    back.cancel()


def test_one_that_it_went_badly_for_has_all_do_it_again_and_newcomers_stay_new() -> None:
    workers = Workers(3)
    workers.met(0, 1, 2)
    verdicts = [workers.agree(worker, worker != 1) for worker in range(3)]
    assert [future.result(20) for future in verdicts] == [False] * 3
    workers.lost(2).result(20)
    back = workers.meet(2)
    workers.met(0, 1)
    assert back.result(20).newcomers == {2}
    verdicts = [workers.agree(worker, worker != 2) for worker in range(3)]
    assert not any(future.result(20) for future in verdicts)
    assert workers.met(0, 1, 2).newcomers == {2}


def test_over_connections_a_rank_that_ends_is_lost() -> None:
    rendezvous = RendezvousServer(2)
    one, other = (RendezvousClient(rendezvous.address, worker, 2) for worker in range(2))
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
    late = RendezvousClient(rendezvous.address, 1, 2)
    late.announce()
    rendezvous.state.lost(0)
    with pytest.raises(RankFailed, match="have ended"):
        late.meet()
    late.close()
    rendezvous.close()


def test_a_place_travels_as_variables() -> None:
    place = RendezvousPlace(1, 4, Address("127.0.0.1", 5, bytes(range(32))), ("localhost", 6))
    assert RendezvousPlace.from_variables(place.as_variables()) == place
    assert RendezvousPlace.from_variables({"RANK": "1", "WORLD_SIZE": "4"}) is None
