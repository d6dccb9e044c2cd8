"""The flight recorder: the last actions and communications of one rank, in a file mapped to memory.

A record outlives its rank, whatever ended it. It can be read while the rank is stopped or holds the
interpreter. An entry takes about a microsecond. Texts are numbered: the file of names beside
the record gives each once.

    header | now: phase, action, wait | the last steps | the last communications
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Final

from plait.doctor.process import start_ticks
from plait.errors import RunError
from plait.uncopied import Uncopied

MAGIC: Final = b"plaitfr1"
NUM_STEPS: Final = 256
NUM_ENTRIES: Final = 2048
HEADER: Final = struct.Struct("<8sQQII")
HEARTBEAT: Final = struct.Struct("<d")
MOVED: Final = struct.Struct("<dQ")
PHASE: Final = struct.Struct("<IIdQ")
ACTION: Final = struct.Struct("<IId")
WAIT: Final = struct.Struct("<IIQQqdQ")
STEP: Final = struct.Struct("<Qdddddddd")
ENTRY: Final = struct.Struct("<QIIQQqddd")
ENTRY_END: Final = struct.Struct("<dd")
HEARTBEAT_AT: Final = 64
MOVED_AT: Final = 72
PHASE_AT: Final = 88
ACTION_AT: Final = 112
WAIT_AT: Final = 128
COMPILING_AT: Final = 192
STEPS_AT: Final = 256
ENTRIES_AT: Final = STEPS_AT + NUM_STEPS * STEP.size
RECORD_BYTES: Final = ENTRIES_AT + NUM_ENTRIES * ENTRY.size
POINT_TO_POINT: Final = ("send", "receive")

Names = dict[str, object]
"""The meaning of a number in a record: an action, or a communication and its ranks."""

_clock = time.perf_counter


class Phase(IntEnum):
    """The part of a run that a rank is in."""

    STARTING = 0
    OUTSIDE = 1  # between two steps, in the code of the user
    LOADING = 2
    STEPPING = 3
    EVALUATING = 4
    SAVING = 5
    ENDING = 6
    DONE = 7
    MEETING = 8  # it has left its world, and waits for the next one


class WaitState(IntEnum):
    """The part of a communication that a rank is in."""

    NONE = 0
    ISSUING = 1
    WAITING = 2


class FlightRecorder(Uncopied):
    """The writer of one rank's record; in memory alone until it is given a folder.

    `rank` is that of the world; `equals` are the ranks that do the same work on other data.
    """

    def __init__(
        self, rank: int, size: int, folder: Path | None = None, equals: Sequence[int] = ()
    ) -> None:
        self.rank = rank
        self.folder = folder
        self.names: list[Names] = []
        self._names: dict[object, int] = {}
        self._numbers: dict[object, int] = {}
        self._num_entries = 0
        self._num_steps = 0
        self._phase = Phase.STARTING
        self._phase_since = _clock()
        self._spent = [0.0] * len(Phase)
        self._last_done = self._phase_since
        self._waited = 0.0
        self._issued = 0.0
        self._faults = (0, 0)
        self._processor_began = time.process_time()
        self._compiling = 0
        self._keeps_names = folder is not None
        self._map = self._mapped(folder)
        self._write_phase()
        self._move(self._phase_since)  # a record begins as one that has just moved
        self.beat()
        # The header comes last: it makes the record one that a reader believes.
        HEADER.pack_into(self._map, 0, MAGIC, os.getpid(), start_ticks(os.getpid()), rank, size)
        if folder is not None:
            if rank == 0:
                forget_beyond(folder, size)
            about = {"pid": os.getpid(), "host": socket.gethostname(), "equals": list(equals)}
            with _writing(names_path(folder, rank)) as path:
                path.write_text(json.dumps(about) + "\n")

    def _mapped(self, folder: Path | None) -> mmap.mmap:
        if folder is None:
            return mmap.mmap(-1, RECORD_BYTES)
        with _writing(record_path(folder, self.rank)) as path:
            folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # a reader of the record before keeps what it has mapped
            path.write_bytes(bytes(RECORD_BYTES))  # a hole kills its writer on a full disk
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), RECORD_BYTES)

    # -- what a rank is doing

    def beat(self) -> None:
        """Say that the interpreter of this rank is free. Called from a thread of its own."""
        HEARTBEAT.pack_into(self._map, HEARTBEAT_AT, _clock())

    def enter(self, phase: Phase) -> None:
        """Be in another phase from here on."""
        now = _clock()
        self._spent[self._phase] += now - self._phase_since
        if phase is Phase.STEPPING:
            self._processor_began = time.process_time()
        self._phase = phase
        self._phase_since = now
        self._write_phase()
        self._move(now)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in a phase inside, and in the one before afterwards."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def action(self, text: str) -> None:
        """An action of the schedule begins."""
        name = self._names.get(text)
        if name is None:
            name = self._named(text, {"action": text})
        now = _clock()
        ACTION.pack_into(self._map, ACTION_AT, name, 0, now)
        self._move(now)

    def compiling(self, change: int) -> None:
        """A compilation begins (1) or ends (-1)."""
        self._compiling = max(0, self._compiling + change)
        struct.pack_into("<I", self._map, COMPILING_AT, self._compiling)
        self._move(_clock())

    def step_done(self, step: int) -> None:
        """A step has ended, which began at the end of the one before."""
        processor_seconds = time.process_time() - self._processor_began
        self.enter(Phase.OUTSIDE)
        now = self._phase_since
        seconds = now - self._last_done
        self._last_done = now
        faults = _page_faults()
        loaded = self._spent[Phase.LOADING] + self._spent[Phase.OUTSIDE]
        STEP.pack_into(
            self._map,
            STEPS_AT + self._num_steps % NUM_STEPS * STEP.size,
            step,
            now,
            seconds,
            loaded,
            self._waited,
            self._issued,
            float(faults[0] - self._faults[0]),
            float(faults[1] - self._faults[1]),
            processor_seconds,
        )
        self._num_steps += 1
        self._faults = faults
        self._spent = [0.0] * len(Phase)
        self._waited = 0.0
        self._issued = 0.0
        self._write_phase()
        self._move(now)

    # -- communications

    def issue(
        self, axis: str, op: str, ranks: Sequence[int], num_bytes: int, peer: int = -1
    ) -> int:
        """A communication begins. Returns its number in the ring, for the calls that follow."""
        name = self._names.get((axis, op))
        if name is None:
            about: Names = {"axis": axis, "op": op, "ranks": list(ranks)}
            name = self._named((axis, op), about)
        key = (axis, op, peer) if op in POINT_TO_POINT else axis
        number = self._numbers.get(key, 0) + 1
        self._numbers[key] = number
        entry = self._num_entries
        self._num_entries = entry + 1
        now = _clock()
        ENTRY.pack_into(
            self._map,
            ENTRIES_AT + entry % NUM_ENTRIES * ENTRY.size,
            *(entry + 1, name, 0, number, num_bytes, peer, now, 0.0, 0.0),
        )
        WAIT.pack_into(
            self._map, WAIT_AT, WaitState.ISSUING, name, number, num_bytes, peer, now, entry + 1
        )
        MOVED.pack_into(self._map, MOVED_AT, now, entry + 1)
        return entry

    def started(self, entry: int) -> None:
        """The call that began it has returned."""
        now = _clock()
        began = WAIT.unpack_from(self._map, WAIT_AT)[5]
        self._issued += now - began
        struct.pack_into("<I", self._map, WAIT_AT, WaitState.NONE)
        self._move(now)

    def wait(self, entry: int) -> float:
        """This rank waits for it from here on; returns the moment."""
        now = _clock()
        at = ENTRIES_AT + entry % NUM_ENTRIES * ENTRY.size
        index, name, _, number, num_bytes, peer, *_ = ENTRY.unpack_from(self._map, at)
        if index == entry + 1:
            WAIT.pack_into(
                self._map, WAIT_AT, WaitState.WAITING, name, number, num_bytes, peer, now, index
            )
        self._move(now)
        return now

    def ended(self, entry: int, began: float) -> None:
        """The wait for communication `entry` is over; it began at `began`, in seconds."""
        now = _clock()
        self._waited += now - began
        at = ENTRIES_AT + entry % NUM_ENTRIES * ENTRY.size
        if struct.unpack_from("<Q", self._map, at)[0] == entry + 1:
            ENTRY_END.pack_into(self._map, at + ENTRY.size - ENTRY_END.size, began, now)
        struct.pack_into("<I", self._map, WAIT_AT, WaitState.NONE)
        self._move(now)

    def waiting_since(self) -> float | None:
        """When the wait began that this rank is in; None when it is in none."""
        state, *_, since, _ = WAIT.unpack_from(self._map, WAIT_AT)
        return since if state else None

    def forget_axes(self) -> None:
        """The axes have other ranks from here on."""
        self._names = {key: name for key, name in self._names.items() if isinstance(key, str)}
        self._numbers.clear()

    def meet(self) -> None:
        """The rank has left its world, and is in no communication any more."""
        struct.pack_into("<I", self._map, WAIT_AT, WaitState.NONE)
        self.enter(Phase.MEETING)

    def close(self) -> None:
        """The rank has come to its end."""
        self.enter(Phase.DONE)

    def view(self) -> bytes:
        """The record as it is now."""
        return bytes(self._map)

    def _named(self, key: object, about: Names) -> int:
        self.names.append(about)
        self._names[key] = len(self.names)
        self._say({"name": len(self.names), **about})
        return len(self.names)

    def _say(self, line: Names) -> None:
        """Keep a name. After one that could not be written, the others would have wrong numbers."""
        if self.folder is None or not self._keeps_names:
            return
        try:
            with names_path(self.folder, self.rank).open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            self._keeps_names = False

    def _write_phase(self) -> None:
        PHASE.pack_into(self._map, PHASE_AT, self._phase, 0, self._phase_since, self._num_steps)

    def _move(self, now: float) -> None:
        MOVED.pack_into(self._map, MOVED_AT, now, self._num_entries)


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """Write a file inside. Errors: `RunError` where the system refuses, which names it."""
    try:
        yield path
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error


def record_path(folder: Path, rank: int) -> Path:
    """The record of a rank."""
    return folder / f"rank-{rank}.flight"


def forget_beyond(folder: Path, size: int) -> None:
    """Remove the records of an earlier start with more than `size` ranks, of those beyond."""
    for path in folder.glob("rank-*.*"):
        rank = path.stem.removeprefix("rank-")
        if rank.isdecimal() and int(rank) >= size:
            path.unlink(missing_ok=True)


def names_path(folder: Path, rank: int) -> Path:
    """The names of a record, a JSON object a line."""
    return folder / f"rank-{rank}.names"


def stack_path(folder: Path, rank: int) -> Path:
    """Where a rank writes the lines that its threads are at, when it is asked by a signal."""
    return folder / f"rank-{rank}.stack"


def _page_faults() -> tuple[int, int]:
    """The pages that this process got from memory, and those from a disk."""
    import resource  # Unix alone has it

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_majflt
