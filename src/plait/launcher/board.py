"""A page of numbers that the launcher and its ranks share: who is where, and what is asked of all.

It lies in a file without a name, which every process of the run maps. Each number is one aligned
word with one writer, so no lock is needed. A rank that is killed leaves it whole.

    signal | void | recalled, decided | waits | resumed, moved | for each seat: begun, waiting, done
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SIGNAL, VOID, RECALLED, DECIDED, WAITS = range(5)
RESUMED, MOVED, SEATS = range(14, 17)
BEGUN, WAITING, DONE = range(3)
WORDS_A_SEAT = 3
WORD_BYTES = 8
NOTHING = -1
GONE = -2


class Waited(IntEnum):
    """The things that a run waits for, or that take processor time beside its steps."""

    SNAPSHOTS = 0
    CHECKPOINTS = 1
    COPYING = 2
    WRITING = 3
    LAST_CHECKPOINT = 4


class Files:
    """Files without a name, for memory that outlives the processes that write it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[Path, int] = {}

    def make(self) -> Path:
        """An empty file, by a path that every process of this user can open."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("plait-run", os.MFD_CLOEXEC)
            path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        else:  # no Linux
            descriptor, name = tempfile.mkstemp(dir=self._folder)
            path = Path(name)
        self._open[path] = descriptor
        return path

    def drop(self, path: Path) -> None:
        """Let go of a file; its memory ends with the last process that maps it."""
        os.close(self._open.pop(path))

    def close(self) -> None:
        """Close every file; the memory of one stays while another process maps it."""
        for path in list(self._open):
            self.drop(path)


@dataclass(frozen=True)
class Page:
    """The location of a board, as a new process gets it."""

    path: Path
    num_seats: int

    def open(self) -> Board:
        """Map the page into this process, as a board."""
        return Board(self.path, self.num_seats)


class Board:
    """The page, in a file of `Files`. Steps count from 0; `NOTHING` stands where nothing is yet.

    Attributes:
        num_seats: the seats of the run.
    """

    def __init__(self, path: Path, num_seats: int) -> None:
        size = WORD_BYTES * (SEATS + WORDS_A_SEAT * num_seats)
        with path.open("r+b") as file:
            is_new = os.fstat(file.fileno()).st_size == 0
            if is_new:
                os.ftruncate(file.fileno(), size)
            self._map = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._map).cast("q")
        self.num_seats = num_seats
        if is_new:
            self._words[VOID] = self._words[RECALLED] = NOTHING
            self.clear()

    @property
    def signal(self) -> int:
        """The signal by which the run is to end; 0 for none."""
        return self._words[SIGNAL]

    def ask_to_end(self, number: int) -> None:
        """Have the run end by a signal. The first one counts."""
        if not self._words[SIGNAL]:
            self._words[SIGNAL] = number

    @property
    def void(self) -> int:
        """The newest generation that has lost a rank."""
        return self._words[VOID]

    def make_void(self, generation: int) -> None:
        """Tell the ranks of a generation that one of them is lost."""
        self._words[VOID] = max(self._words[VOID], generation)

    @property
    def recalled(self) -> int:
        """The newest generation whose ranks are to meet between two steps."""
        return self._words[RECALLED]

    def recall(self, generation: int) -> None:
        """Have the ranks of a generation meet between two steps."""
        self._words[RECALLED] = generation

    @property
    def decided(self) -> int:
        """The signal by which a generation ends, as its first rank has decided; 0 for a recall.
        `NOTHING` before that.
        """
        return self._words[DECIDED]

    def decide(self, number: int) -> None:
        """Say for all why this generation ends between two steps."""
        self._words[DECIDED] = number

    def add_wait(self, what: Waited, seconds: float, count: int) -> None:
        """Note that the first rank's steps waited, for so many of it. It is never forgotten."""
        place = WAITS + 2 * what
        self._words[place] += count
        self._words[place + 1] += round(seconds * 1e9)

    def waits(self, what: Waited) -> tuple[int, float]:
        """The number of them, and the seconds that steps waited for them."""
        place = WAITS + 2 * what
        return self._words[place], self._words[place + 1] / 1e9

    def clear(self) -> None:
        """Forget all steps, before a generation begins."""
        self._words[RESUMED] = self._words[MOVED] = self._words[DECIDED] = NOTHING
        for seat in range(self.num_seats):
            for word in (BEGUN, WAITING, DONE):
                self._set(seat, word, NOTHING)

    def resume(self, seat: int, step: int) -> None:
        """Say from how many steps on this generation goes."""
        self._words[RESUMED] = step
        self._set(seat, DONE, step)

    @property
    def resumed(self) -> int:
        """The steps that were done when this generation began."""
        return self._words[RESUMED]

    @property
    def moved(self) -> float:
        """The moment at which this generation had done its first step, in seconds of the monotonic
        clock; below 0 before that.
        """
        return self._words[MOVED] / 1e9

    def begin(self, seat: int, step: int) -> None:
        """Say that the step is begun."""
        self._set(seat, BEGUN, step)

    def begun(self, seat: int) -> int:
        """The newest step that a seat has begun."""
        return self._get(seat, BEGUN)

    def enter(self, seat: int) -> None:
        """A rank has come to a seat, where ranks come and go."""
        for word in (BEGUN, WAITING, DONE):
            self._set(seat, word, NOTHING)

    def leave(self, seat: int) -> None:
        """A rank is gone from its seat, and no rank waits for it."""
        self._set(seat, BEGUN, GONE)

    def wait_at(self, seat: int, step: int) -> None:
        """Say that the rank would end before this step."""
        self._set(seat, WAITING, step)

    def waits_at(self, seat: int) -> int:
        """The step before which the rank of a seat would end."""
        return self._get(seat, WAITING)

    def finish(self, seat: int, step: int) -> None:
        """Say that so many steps are done, now."""
        if self._words[MOVED] == NOTHING:
            self._words[MOVED] = time.monotonic_ns()
        self._set(seat, DONE, step)

    def done(self, seat: int) -> int:
        """The steps that a seat has done."""
        return self._get(seat, DONE)

    def close(self) -> None:
        """Unmap the page from this process."""
        self._words.release()
        self._map.close()

    def _place(self, seat: int, word: int) -> int:
        return SEATS + WORDS_A_SEAT * seat + word

    def _get(self, seat: int, word: int) -> int:
        return self._words[self._place(seat, word)]

    def _set(self, seat: int, word: int, value: int) -> None:
        self._words[self._place(seat, word)] = value
