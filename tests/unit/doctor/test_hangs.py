"""Who is at fault where ranks wait: read from records alone."""

from __future__ import annotations

from plait.doctor.flight import FlightRecorder, Phase
from plait.doctor.hangs import Fault, at_fault, awaited, first_difference
from plait.doctor.record import RankSnapshot, own_view

RANKS = (0, 1, 2)


def recorders(count: int = 3) -> list[FlightRecorder]:
    return [FlightRecorder(rank, count) for rank in range(count)]


def reduce(recorder: FlightRecorder, num_bytes: int = 8, op: str = "all_reduce") -> None:
    entry = recorder.issue("dp", op, RANKS, num_bytes)
    recorder.started(entry)
    recorder.ended(entry, recorder.wait(entry))


def hang(recorder: FlightRecorder, op: str = "all_reduce", num_bytes: int = 8) -> None:
    entry = recorder.issue("dp", op, RANKS, num_bytes)
    recorder.started(entry)
    recorder.wait(entry)


def views(known: list[FlightRecorder]) -> dict[int, RankSnapshot]:
    return {recorder.rank: own_view(recorder) for recorder in known}


def fault(known: list[FlightRecorder], frozen: tuple[int, ...] = ()) -> Fault:
    found = at_fault(views(known), [one.rank for one in known], frozen)
    assert found is not None
    return found


def test_a_rank_that_does_not_come_is_at_fault() -> None:
    known = recorders()
    for one in known:
        reduce(one)
    hang(known[0])
    hang(known[2])
    known[1].enter(Phase.LOADING)
    assert awaited(views(known)[0], views(known)) == (1,)
    found = fault(known)
    assert (found.rank, found.waiting) == (1, (0, 2))
    assert found.place is not None
    assert found.place.text() == "all_reduce on axis dp (its operation 2)"
    assert own_view(known[1]).doing() == "loading the batch"


def test_nobody_is_at_fault_while_the_awaited_rank_moves() -> None:
    known = recorders()
    hang(known[0])
    assert at_fault(views(known), [0]) is None


def test_a_mismatched_size_is_that_of_the_odd_one() -> None:
    known = recorders()
    hang(known[0])
    hang(known[1], num_bytes=16)
    hang(known[2])
    found = fault(known)
    assert found.rank == 1
    assert found.why == "mismatched size: 16 bytes where others have 8"


def test_of_two_the_one_that_skipped_is_known_by_its_step_before() -> None:
    known = recorders()
    for one in known:
        for step in range(3):
            one.step_done(step)
            reduce(one)
            reduce(one, op="all_gather")
        one.step_done(3)
    hang(known[0])
    hang(known[1], op="all_gather")
    found = at_fault({rank: one for rank, one in views(known).items() if rank < 2}, [0, 1])
    assert found is not None
    assert found.rank == 1
    assert found.why is not None
    assert found.why.startswith("skipped a communication")


def test_a_message_is_awaited_from_its_sender() -> None:
    known = recorders()
    entry = known[0].issue("pp", "receive", RANKS, 0, 2)
    known[0].started(entry)
    known[0].wait(entry)
    hang(known[2])
    assert awaited(views(known)[0], views(known)) == (2,)
    found = fault(known)
    assert found.rank == 1
    assert set(found.waiting) == {0, 2}


def test_a_frozen_process_is_at_fault_wherever_it_is() -> None:
    known = recorders()
    for one in known:
        hang(one)
    assert fault(known, frozen=(2,)).rank == 2
    assert str(fault(known).why).startswith("link")


def test_a_difference_is_found_though_the_ranks_went_on() -> None:
    known = recorders()
    for one in known:
        reduce(one)
    assert first_difference(views(known)) is None
    reduce(known[0])
    reduce(known[1], num_bytes=32)
    reduce(known[2])
    reduce(known[0], op="all_gather")
    found = first_difference(views(known))
    assert found is not None
    assert (found.rank, found.why) == (1, "mismatched size: 32 bytes where others have 8")
