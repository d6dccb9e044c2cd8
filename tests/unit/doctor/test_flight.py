"""Records outlive their writer and are read while it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.doctor.flight import (
    HEARTBEAT_AT,
    MOVED_AT,
    NUM_ENTRIES,
    NUM_STEPS,
    RECORD_BYTES,
    FlightRecorder,
    Phase,
    names_path,
    record_path,
)
from plait.doctor.record import Records, now, own_view
from plait.errors import RunError


def test_a_record_says_what_its_rank_does(tmp_path: Path) -> None:
    recorder = FlightRecorder(1, 4, tmp_path, equals=(1, 3))
    recorder.enter(Phase.STEPPING)
    recorder.action("0F1")
    view = Records(tmp_path).views()[1]
    assert (view.rank, view.size, view.equals) == (1, 4, (1, 3))
    assert view.doing() == "action 0F1"
    entry = recorder.issue("tp", "all_gather", (1, 2), 64)
    recorder.started(entry)
    assert not own_view(recorder).waits
    began = recorder.wait(entry)
    assert Records(tmp_path).views()[1].doing() == "all_gather on axis tp (its operation 1)"
    recorder.ended(entry, began)
    recorder.step_done(7)
    view = own_view(recorder)
    assert (view.last_step, view.phase, view.waits) == (7, Phase.OUTSIDE, False)
    assert view.entries[0].ended >= view.entries[0].issued > 0
    recorder.close()
    assert Records(tmp_path).views()[1].phase is Phase.DONE


def test_rings_keep_the_last_of_many() -> None:
    recorder = FlightRecorder(0, 2)
    for number in range(NUM_ENTRIES + 5):
        recorder.started(recorder.issue("dp", "all_reduce", (0, 1), number))
    for step in range(NUM_STEPS + 3):
        recorder.step_done(step + 1)
    view = own_view(recorder)
    assert [one.number for one in view.entries] == list(range(6, NUM_ENTRIES + 6))
    assert [one.step for one in view.steps] == list(range(4, NUM_STEPS + 4))


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    FlightRecorder(0, 2, tmp_path)
    record_path(tmp_path, 1).write_bytes(b"nothing")
    assert list(Records(tmp_path).views()) == [0]


def test_the_place_of_a_record_is_taken_at_once(tmp_path: Path) -> None:
    FlightRecorder(0, 1, tmp_path)
    assert record_path(tmp_path, 0).stat().st_blocks * 512 >= RECORD_BYTES


def test_a_record_without_a_place_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.touch()
    with pytest.raises(RunError, match=r"rank-0\.flight cannot be written: File exists"):
        FlightRecorder(0, 1, folder)


def test_a_name_that_cannot_be_kept_ends_no_run(tmp_path: Path) -> None:
    recorder = FlightRecorder(0, 1, tmp_path)
    recorder.enter(Phase.STEPPING)
    recorder.action("0F0")
    names = names_path(tmp_path, 0)
    names.rename(tmp_path / "aside")
    names.mkdir()  # so that the system refuses
    recorder.action("0B0")
    names.rmdir()
    (tmp_path / "aside").rename(names)
    recorder.action("0U")  # its number is not that of the line after the first name
    assert len(names.read_text().splitlines()) == 2
    recorder.action("0F0")
    assert Records(tmp_path).views()[0].doing() == "action 0F0"


def test_a_start_with_fewer_ranks_leaves_no_record_of_those_beyond(tmp_path: Path) -> None:
    for rank in range(4):
        FlightRecorder(rank, 4, tmp_path)
    for rank in (1, 0):
        FlightRecorder(rank, 2, tmp_path)
    assert list(Records(tmp_path).views()) == [0, 1]
    assert not list(tmp_path.glob("rank-[23].*"))


def test_a_record_that_has_just_begun_has_just_moved(tmp_path: Path) -> None:
    before = now()
    FlightRecorder(0, 2, tmp_path)
    view = Records(tmp_path).views()[0]
    assert before <= view.moved <= now()


def test_a_record_that_is_being_written_is_one_that_moves() -> None:
    """`struct.pack_into` writes zeros first, and the writer may lose its processor just then."""
    flight = FlightRecorder(0, 2)
    before = now()
    flight._map[HEARTBEAT_AT : MOVED_AT + 8] = bytes(MOVED_AT + 8 - HEARTBEAT_AT)
    view = own_view(flight)
    assert view.moved >= before
    assert view.heartbeat >= before
