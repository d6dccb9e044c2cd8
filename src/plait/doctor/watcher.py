"""The watcher: a thread that reads the records of all ranks, and names what hangs or lags.

It runs in the launcher, which no rank can hold up. In a world that others have started it runs in
every rank, and the first to claim a finding acts. A hang ends by the death of the rank at fault.
So a run that starts lost ranks again treats it as any other lost rank.

A rank that has not moved for the limit hangs, with three exceptions. A process that was ready and
had no processor most of that time does not. Its time is over once it has computed for the limit.
While it starts, compiles, evaluates, saves, or is in its first two steps, it may take
`SLOW_SECONDS`. Its process must then compute, read or write. A rank that waits is judged by whom
it waits for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from plait.doctor import findings, hangs, process
from plait.doctor.findings import RunFinding
from plait.doctor.flight import Phase
from plait.doctor.lines import line_of, stack_of
from plait.doctor.record import RankSnapshot, Records, now
from plait.doctor.stragglers import Stragglers

LOOK_SECONDS: Final = 0.5
LEAST_SECONDS: Final = 5.0
SLOW_SECONDS: Final = 900.0
QUIET_SECONDS: Final = 120.0
STEPS_OF_A_HANG: Final = 10
FIRST_STEPS: Final = 2
STALE_SECONDS: Final = 3.0
BUSY_CPU: Final = 0.05
BUSY_BYTES: Final = 1 << 14
STARVED: Final = 0.5
SLOW_PHASES: Final = (Phase.STARTING, Phase.EVALUATING, Phase.SAVING, Phase.ENDING)

End = Callable[[RankSnapshot, RunFinding], None]


@dataclass(frozen=True)
class HangLimits:
    """The seconds after which a rank that does not move hangs; without `seconds`, several measured
    steps. `ends` says whether a hang ends its rank.
    """

    seconds: float | None = None
    ends: bool = True

    def of(self, steps: list[float]) -> float:
        """The limit, given the seconds of the last steps of all ranks."""
        if self.seconds is not None:
            return self.seconds
        recent = sorted(steps)
        middle = recent[len(recent) // 2] if recent else 0.0
        longest = recent[-1] if recent else 0.0
        return max(LEAST_SECONDS, STEPS_OF_A_HANG * middle, STEPS_OF_A_HANG / 2 * longest)


def kill(view: RankSnapshot, finding: RunFinding) -> None:
    """End the process of the rank of `view` at once; one that has gone already is no error."""
    with contextlib.suppress(OSError):
        os.kill(view.pid, getattr(signal, "SIGKILL", signal.SIGTERM))


class Watcher:
    """The watcher of one folder of records.

    Attributes:
        hang: what has ended a rank, and the run with it, until another step is done.
    """

    def __init__(self, folder: Path, limits: HangLimits, end: End = kill) -> None:
        self.hang: RunFinding | None = None
        self._hung_at = 0.0
        self._ended: dict[int, RunFinding] = {}
        self._folder = folder
        self._limits = limits
        self._end = end
        self._records = Records(folder)
        self._stragglers = Stragglers()
        self._usage: dict[int, tuple[float, process.Usage]] = {}
        self._judged: set[tuple[int, float]] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._live, name="plait-watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _live(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            views = self._running()
            if views:
                self._look(views)

    def _running(self) -> dict[int, RankSnapshot]:
        """The living ranks of a world. Those between two worlds are their launcher's."""
        views = self._records.views()
        at_work = {rank: view for rank, view in views.items() if view.phase is not Phase.MEETING}
        return {rank: view for rank, view in at_work.items() if view.process_state()}

    def look_back(self) -> None:
        """After a failure: name the rank that was in another communication than the others."""
        views = self._records.views()
        fault = hangs.first_difference(views)
        if self.hang is None and fault is not None and self._claim(views[fault.rank]):
            view = views[fault.rank]
            awaits = hangs.awaited(view, views)
            where = view.doing() if fault.place is None else fault.place.text()
            words = RunFinding("hang", view.rank, view.last_step + 1, where, str(fault.why), awaits)
            self.hang = words
            self._report(words)

    def _look(self, views: dict[int, RankSnapshot]) -> None:
        if any(view.steps and view.steps[-1].ended > self._hung_at for view in views.values()):
            self.hang = None  # the run has gone on without that rank
        limit = self._limits.of(recent_seconds(views))
        moment = now()
        idle = [rank for rank, view in views.items() if moment - view.moved > limit]
        for rank in views:
            if rank not in idle:
                self._usage.pop(rank, None)
        for rank, view in views.items():
            if moment - view.moved > limit / 2 and rank not in self._usage:
                self._usage[rank] = (moment, process.usage(view.pid))
        stuck = [rank for rank in idle if not self._may_be_slow(views[rank], limit)]
        if stuck:
            self._judge(views, idle, stuck, limit)
        else:
            for finding in self._stragglers.look(views):
                self._report(finding)

    def _may_be_slow(self, view: RankSnapshot, limit: float) -> bool:
        """Whether a rank that does not move is in a part of the run that takes long, and works."""
        still = now() - view.moved
        if still > SLOW_SECONDS or view.process_state() in ("T", "t"):
            return False
        moment = now()
        since, before = self._usage.get(view.rank, (moment, None))
        if before is None or moment - since < 1.0:
            return True
        after = process.usage(view.pid)
        seconds = moment - since
        if is_starved(before, after, seconds, limit):
            return True
        early = view.last_step == 0 or len(view.steps) < FIRST_STEPS
        if not (view.compiling or early or view.phase in SLOW_PHASES) or view.waits:
            return False
        quiet = max(limit, QUIET_SECONDS) if view.phase in SLOW_PHASES else limit
        return still <= quiet or works(before, after, seconds)

    def _judge(
        self, views: dict[int, RankSnapshot], idle: list[int], stuck: list[int], limit: float
    ) -> None:
        frozen = [rank for rank in idle if is_frozen(views[rank])]
        fault = hangs.at_fault(views, idle, frozen)
        if fault is None or fault.rank not in stuck:
            return
        view = views[fault.rank]
        mark = (view.rank, view.moved)
        if mark in self._judged or not self._claim(view):
            return
        self._judged.add(mark)
        finding = finding_of(view, fault, views, limit)
        stack = stack_of(self._folder, view)
        finding = replace(finding, line=line_of(stack), details={**finding.details, "stack": stack})
        self._report(finding)
        if self._limits.ends:
            self.hang = finding
            self._hung_at = now()
            self._ended[view.pid] = finding
            self._end(view, finding)

    def why_ended(self, pid: int) -> str | None:
        """The cause for which this watcher has ended a process; None where it has not."""
        finding = self._ended.get(pid)
        return None if finding is None else f"{finding.where}: {finding.cause}"

    def _claim(self, view: RankSnapshot) -> bool:
        """Whether no other watcher has taken up this fault."""
        path = self._folder / f"hang-{view.pid}-{view.last_step}.claim"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except OSError:
            return False
        return True

    def _report(self, finding: RunFinding) -> None:
        findings.report(self._folder, finding)


def recent_seconds(views: dict[int, RankSnapshot]) -> list[float]:
    """The seconds of the last steps of all ranks, the first of a run left out."""
    return [one.seconds for view in views.values() for one in view.steps[-32:] if one.step > 1]


def works(before: process.Usage, after: process.Usage, seconds: float) -> bool:
    """Whether a process has computed, read or written, or would have with a processor."""
    ran = after.cpu_seconds - before.cpu_seconds + after.delay_seconds - before.delay_seconds
    moved = after.io_bytes - before.io_bytes > BUSY_BYTES * seconds
    return ran > BUSY_CPU * seconds or moved or after.major_faults > before.major_faults


def is_starved(before: process.Usage, after: process.Usage, seconds: float, limit: float) -> bool:
    """Whether a process was ready and had no processor for most of these seconds.

    One that has computed for the limit all the same has had its time, as an endless loop has.
    """
    delay = after.delay_seconds - before.delay_seconds
    return delay > STARVED * seconds and after.cpu_seconds - before.cpu_seconds < limit


def is_frozen(view: RankSnapshot) -> bool:
    """Whether a process is stopped, or its interpreter does nothing but one call."""
    stopped = view.process_state() in ("T", "t")
    return stopped or now() - view.heartbeat > STALE_SECONDS


def finding_of(
    view: RankSnapshot, fault: hangs.Fault, views: dict[int, RankSnapshot], limit: float
) -> RunFinding:
    """The words for a rank that hangs."""
    where = view.doing()
    if fault.place is not None and fault.waiting:
        others = ", ".join(map(str, fault.waiting))
        where = f"{where}, while {fault.place.text()} waits for it on rank {others}"
    silent = f"rank {view.rank} (process {view.pid}) was silent for {limit:g} s"
    return RunFinding(
        "hang",
        view.rank,
        view.last_step + 1,
        where,
        f"{cause_of(view, fault)}; {silent} ([recovery] hang_seconds)",
        hangs.awaited(view, views),
        details={
            "pid": view.pid,
            "waiting_ranks": list(fault.waiting),
            "seconds": now() - view.moved,
        },
    )


def cause_of(view: RankSnapshot, fault: hangs.Fault) -> str:
    """Why a rank does not move."""
    state = view.process_state()
    stale = now() - view.heartbeat > STALE_SECONDS
    causes = (
        (state in ("T", "t"), "stopped process: a signal or a debugger has stopped it"),
        (fault.why is not None, str(fault.why)),
        (stale, "held interpreter: one call outside Python keeps the GIL"),
        (view.phase is Phase.LOADING, "loader: the batch does not come"),
        (view.phase is Phase.OUTSIDE, "the code between two steps does not return"),
        (state == "D", "disk: the process waits for a device"),
        (view.waits, "it waits in a communication that others have left"),
    )
    return next((words for holds, words in causes if holds), f"{view.doing()} does not end")
