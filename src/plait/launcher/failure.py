"""A rank's failure as a small JSON file, and the error that it becomes in the launcher.

Text rather than pickle: an exception class that cannot be unpickled would turn one error into
another.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from plait import errors
from plait.errors import PlaitError, RankFailed

TRACEBACK_LINES = 12
CURES = {
    "SIGKILL": "; the kernel kills so when memory runs out: see dmesg",
    "SIGBUS": "; the kernel kills so when a file in memory cannot be written: the disk of the run, "
    "or /dev/shm, is full or read-only",
}


@dataclass(frozen=True)
class Failure:
    """The report of a rank that failed; `seconds` is the wall clock, to find which came first."""

    rank: int
    kind: str
    message: str
    traceback: str
    seconds: float

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """The failure of `rank` by `error`."""
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return cls(rank, type(error).__name__, str(error), "".join(lines), time.time())

    def write(self, folder: Path) -> None:
        """Leave it where the launcher looks; whole or not at all."""
        path = folder / f"rank{self.rank}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)

    def as_error(self) -> PlaitError:
        """The exception to raise: a `PlaitError` keeps class and message, others become
        `RankFailed` with their traceback's end.
        """
        known = getattr(errors, self.kind, None)
        if not (isinstance(known, type) and issubclass(known, PlaitError)):
            tail = "\n".join(self.traceback.rstrip().splitlines()[-TRACEBACK_LINES:])
            return RankFailed(f"rank {self.rank} failed: {self.kind}: {self.message}\n{tail}")
        error = known(self.message)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"in rank {self.rank}:\n{self.traceback}")
        return error


def read_failures(folder: Path) -> list[Failure]:
    """All failures written so far, the earliest first."""
    found = [Failure(**json.loads(path.read_text())) for path in folder.glob("rank*.json")]
    return sorted(found, key=lambda failure: failure.seconds)


def died_silently(rank: int, exit_code: int) -> RankFailed:
    """The error for a rank that left no word: a signal, or an exit from native code."""
    if exit_code >= 0:
        return RankFailed(
            f"rank {rank} ended with exit code {exit_code} and left no error; the other ranks were "
            "stopped"
        )
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    cure = CURES.get(name, "")
    return RankFailed(f"rank {rank} was killed by {name}{cure}; the other ranks were stopped")


def ended(rank: int, reason: str) -> RankFailed:
    """The error for a rank that its launcher or its watcher has ended, and why."""
    return RankFailed(f"rank {rank} was ended: {reason}; the other ranks were stopped")
