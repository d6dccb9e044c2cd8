"""Processes of a run that get nowhere while the doctor cannot see them yet.

The records of the doctor begin when the ranks have met in their world. Before that the system alone
tells what a process does. One that a signal has stopped is lost after the seconds of a hang. One
that is still loading, and for long neither computes nor reads, is lost too.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from plait.doctor import process

LOOK_SECONDS = 1.0
LEAST_SECONDS = 5.0
IDLE_SECONDS = 60.0
WORK_SECONDS = 0.01  # of a processor, or of waiting for one, since the look before


@dataclass
class _Seen:
    """The state of a process at the last look, and how long it has been so."""

    usage: process.Usage
    stopped_seconds: float = 0.0
    idle_seconds: float = 0.0


class Stalled:
    """Looks at processes once a second. `hang_seconds` as in `[recovery]`."""

    def __init__(self, hang_seconds: float | None) -> None:
        self._limit = LEAST_SECONDS if hang_seconds is None else hang_seconds
        self._looked = 0.0
        self._seen: dict[int, _Seen] = {}

    def look(self, loading: Collection[int], joining: Collection[int]) -> dict[int, str]:
        """Why processes are to be ended, by their number.

        Those that are `loading` wait for no rank; those that are `joining` may wait for others.
        """
        moment = time.monotonic()
        passed = moment - self._looked
        if passed < LOOK_SECONDS:
            return {}
        self._looked = moment
        passed = min(passed, 2 * LOOK_SECONDS)  # this process may have been stopped with them
        known = {*loading, *joining}
        self._seen = {pid: self._now(pid, passed) for pid in known}
        stalled = {}
        for pid, seen in self._seen.items():
            if seen.stopped_seconds >= self._limit:
                stalled[pid] = f"a signal or a debugger has stopped it for {self._limit:g} s"
            elif pid in loading and seen.idle_seconds >= max(IDLE_SECONDS, self._limit):
                stalled[pid] = f"it did nothing for {seen.idle_seconds:.0f} s while it started"
        return stalled

    def _now(self, pid: int, passed: float) -> _Seen:
        """A process as it is, `passed` seconds after the last look."""
        usage = process.usage(pid)
        before = self._seen.get(pid)
        if before is None:
            return _Seen(usage)
        is_stopped = process.state(pid) in ("T", "t")
        stopped_seconds = before.stopped_seconds + passed if is_stopped else 0.0
        is_idle = not _works(before.usage, usage)
        return _Seen(usage, stopped_seconds, before.idle_seconds + passed if is_idle else 0.0)


def _works(before: process.Usage, after: process.Usage) -> bool:
    """Whether a process has computed, read or written, or was ready to."""
    ran = after.cpu_seconds - before.cpu_seconds + after.delay_seconds - before.delay_seconds
    return (
        ran > WORK_SECONDS
        or after.io_bytes > before.io_bytes
        or after.major_faults > before.major_faults
    )
