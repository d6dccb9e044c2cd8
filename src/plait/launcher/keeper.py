"""A launcher that keeps a run alive: it starts a lost rank again, or has the others go on without.

The other launchers either end all ranks (`agent`) or let each go its own way (`supervisor`). Here
ranks step together, so all of them go back together. A process that is left comes to a meeting.
There it gets a rank of the next *generation*, in a new process group. This process also holds
the memory that outlives any rank: the board, and the snapshots.

A rank that was started again and has not come in time is a *newcomer*. The others go on without it
under another plan. When it comes they are recalled between two steps, and return to the first plan.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from plait.comm.network import LOOPBACK
from plait.errors import PlaitError, RankFailed
from plait.launcher.board import NOTHING, Board, Files
from plait.launcher.failure import died_silently, ended, read_failures
from plait.launcher.hearing import SIGNALS, heard
from plait.launcher.kept_process import KeptProcess, RunFacts, start_process
from plait.launcher.leftovers import leftovers
from plait.launcher.main_process import say
from plait.launcher.policy import PlanChoices, Policy, deadline_passed
from plait.launcher.seat import Assignment, LaunchPlan, Note, RankLoss
from plait.launcher.snapshot_files import SnapshotFiles
from plait.launcher.stalled import Stalled

Main = Callable[..., object]
LOOK_SECONDS = 0.1
SILENT_SECONDS = 10.0
BUSY_SECONDS = 120.0
FAREWELL_SECONDS = 5.0
STOPPED = "; the other ranks were stopped"  # at the end of an error, where they go on


@dataclass(frozen=True)
class RunResults:
    """The results of a run that came to its end, by rank, and the signal that ended it, or 0."""

    results: list[Any]
    signal: int = 0


def keep(main: Main, args: tuple[object, ...], plan: LaunchPlan, policy: Policy) -> RunResults:
    """Run `main(seat, *args)` in the ranks of a plan, until all of them are done.

    Errors: what no restart cures, as with `launch`. `RunError` when a signal asks for the end and
    the ranks have not saved by the deadline.
    """
    with leftovers() as folder:
        run = _Run(main, args, plan, policy, folder)
        with heard(run.hear):
            try:
                return run.until_done()
            finally:
                run.end()


class _Run:
    """The processes of a run, their seats, and the meetings."""

    def __init__(
        self, main: Main, args: tuple[object, ...], plan: LaunchPlan, policy: Policy, folder: Path
    ) -> None:
        self._plan = plan
        self._policy = policy
        self._failures = folder
        self._files = Files(folder)
        self._num_seats = plan.size
        board = self._files.make()
        self._board = Board(board, plan.size)
        start = RunFacts(folder, board, plan.size, policy.goes_on)
        self._start_process = partial(start_process, start, main, args)
        self._ranks: dict[int, KeptProcess] = {}
        self._notes: dict[int, Note] = {}
        self._members: tuple[int, ...] = tuple(range(plan.size))
        self._generation = -1
        self._restarts = policy.restarts
        self._plans = PlanChoices(plan, policy.choose)
        self._snapshots = SnapshotFiles(self._files, plan.size)
        self._retries: dict[int, float] = {}
        self._failed_starts: Counter[int] = Counter()
        self._met: set[int] = set()
        self._is_recalled = False
        self._lost: list[int] = []
        self._cause = ""
        self._lost_at = 0.0
        self._steps_done = 0
        self._losses: list[RankLoss] = []
        self._first_note = 0.0
        self._signals: list[int] = []
        self._asked_at: float | None = None
        self._stalled = Stalled(policy.hang_seconds)
        self._ended: dict[int, str] = {}

    def hear(self, number: int, frame: object) -> None:
        """Take note of a signal. The second one ends the run at once."""
        self._signals.append(number)
        if number != signal.SIGHUP:
            self._board.ask_to_end(number)

    def until_done(self) -> RunResults:
        """Go through meetings until every rank has a result."""
        for seat in range(self._num_seats):
            self._start(seat)
        while True:
            self._listen()
            self._look_at_signals()
            self._look_at_the_silent()
            self._look_at_the_stalled()
            self._start_due()
            self._look_at_the_returned()
            if self._is_done():
                return RunResults(self._results(), self._board.signal)
            if self._is_ready():
                self._hold_meeting()

    def end(self) -> None:
        """Leave no process behind."""
        for rank in self._ranks.values():
            rank.process.kill()
        for rank in self._ranks.values():
            rank.process.join()
            rank.line.close()
        self._board.close()
        self._files.close()

    # -- processes
    # ------------------------------------------------------------------------------------------

    def _start(self, seat: int) -> None:
        self._ranks[seat] = self._start_process(seat)

    def _listen(self) -> None:
        """Take the words of ranks, and notice those that are gone. Waits a moment for one."""
        seats = {rank.line: seat for seat, rank in self._ranks.items()}
        for line in wait(list(seats), LOOK_SECONDS):
            seat = seats[line]  # type: ignore[index]
            try:
                note = self._ranks[seat].line.recv()
            except (EOFError, OSError):
                self._lose(seat)
                continue
            if seat in self._members and not self._come():
                self._first_note = time.monotonic()
            self._ranks[seat].has_come = True
            self._failed_starts[seat] = 0
            self._notes[seat] = note

    def _come(self) -> list[int]:
        """The members of this generation that have come to the next meeting."""
        return [seat for seat in self._members if seat in self._notes]

    def _lose(self, seat: int) -> None:
        """A process is gone: start it again, or do without. Raises what cannot be cured."""
        moment = time.monotonic()
        rank = self._ranks.pop(seat)
        rank.line.close()
        rank.process.join()
        self._notes.pop(seat, None)
        code = rank.process.exitcode or 0
        if -code in SIGNALS:  # a second one, or it came before the rank could hear it
            if self._generation >= 0 and self._restarts and not rank.has_come:
                self._board.ask_to_end(-code)  # the others have something to save
            else:
                self._signals += [-code, -code]
                self._look_at_signals()
        error = self._error_of(seat, rank, code)
        if not isinstance(error, RankFailed) or not self._policy.goes_on:
            raise error
        if seat in self._members:
            cause = str(error).partition("\n")[0].removesuffix(STOPPED)
            self._note_loss(seat, cause, moment)
        if not self._restarts:
            if self._policy.choose is None:
                raise error
            return
        self._restarts -= 1
        self._failed_starts[seat] += not rank.has_come
        is_refused = self._failed_starts[seat] > 1
        self._retries[seat] = moment + self._policy.wait_seconds * is_refused
        self._start_due()

    def _start_due(self) -> None:
        """Start the seats again whose time has come: at once, but after two starts that failed."""
        now = time.monotonic()
        for seat in [seat for seat, moment in self._retries.items() if moment <= now]:
            del self._retries[seat]
            self._start(seat)

    def _note_loss(self, seat: int, cause: str, moment: float) -> None:
        number = self._members.index(seat)
        if not self._lost:
            self._cause = cause
            self._lost_at = moment
        if number not in self._lost:
            self._lost.append(number)
        self._board.make_void(self._generation)

    def _error_of(self, seat: int, rank: KeptProcess, code: int) -> PlaitError:
        """The error that a rank has reported, or the way in which it died.

        Where the run ends with it, the earliest error of any rank is the cause of the others.
        """
        number = self._members.index(seat) if seat in self._members else seat
        failures = read_failures(self._failures)
        of_rank = [failure for failure in failures if failure.rank == number]
        if not of_rank:
            pid = rank.process.pid or 0
            reason = self._ended.get(pid) or self._policy.why_ended(pid)
            return died_silently(number, code) if reason is None else ended(number, reason)
        if not self._policy.goes_on:
            return failures[0].as_error()
        (self._failures / f"rank{number}.json").unlink()
        return of_rank[0].as_error()

    # -- moments
    # ------------------------------------------------------------------------------------------

    def _look_at_signals(self) -> None:
        """Raise when the run is to end at once, or its time to end is over."""
        if signal.SIGHUP in self._signals:
            raise SystemExit(128 + signal.SIGHUP)
        if len(self._signals) > 1:
            if self._signals[-1] == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + self._signals[-1])
        if not self._board.signal:
            return
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        if now - self._asked_at > self._policy.deadline_seconds:
            raise deadline_passed(self._board.signal, self._policy.deadline_seconds)

    def _look_at_the_silent(self) -> None:
        """End ranks that do not come to a meeting for which the others wait."""
        if self._generation < 0:
            return
        now = time.monotonic()
        come = self._come()
        waits = bool(come) and not all(self._notes[seat].is_done for seat in come)
        patience = BUSY_SECONDS if self._lost else SILENT_SECONDS
        for seat, rank in self._ranks.items():
            is_absent = waits and seat in self._members and seat not in self._notes
            if rank.has_come and is_absent and now > self._first_note + patience:
                reason = f"it did not meet the others for {patience:g} s"
                self._ended.setdefault(rank.process.pid or 0, reason)
                rank.process.kill()

    def _look_at_the_stalled(self) -> None:
        """End processes that get nowhere before they are at work."""
        loading, joining = set(), set()
        for seat, rank in self._ranks.items():
            if not rank.has_come:
                loading.add(rank.process.pid or 0)
            elif seat not in self._notes and (self._lost or self._board.done(seat) == NOTHING):
                joining.add(rank.process.pid or 0)
        self._ended.update(self._stalled.look(loading, joining))
        for rank in self._ranks.values():
            if rank.process.pid in self._ended:
                rank.process.kill()

    def _look_at_the_returned(self) -> None:
        """Have the members come, where those that have come since allow for more of them."""
        is_settled = self._generation >= 0 and not self._lost and not self._come()
        if self._is_recalled or not is_settled or self._board.signal:
            return
        num_back = len(self._notes.keys() - self._met)
        plan = self._plans.of(len(self._members) + len(self._notes)) if num_back else None
        if plan is None or plan.size <= self._plan.size:
            return
        self._is_recalled = True
        self._cause = "a rank is back" if num_back == 1 else f"{num_back} ranks are back"
        self._lost_at = time.monotonic()
        self._board.recall(self._generation)

    # -- meetings
    # ------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        if self._generation < 0 or self._lost:
            return False
        come = self._come()
        return len(come) == len(self._members) and all(self._notes[seat].is_done for seat in come)

    def _is_ready(self) -> bool:
        """Whether the next generation begins: no other is awaited, or they have had their time.

        Those that were at work are always awaited; a rank that starts is for `wait_seconds`.
        """
        absent = [rank for seat, rank in self._ranks.items() if seat not in self._notes]
        if any(rank.has_come for rank in absent):
            return False
        if not absent and not self._retries:
            return True
        if self._generation < 0 or time.monotonic() < self._lost_at + self._policy.wait_seconds:
            return False
        return bool(self._notes) and self._plans.of(len(self._notes)) is not None

    def _results(self) -> list[Any]:
        """Let every process end, and give the results by rank."""
        for rank in self._ranks.values():
            with suppress(OSError):
                rank.line.send(None)
        for rank in self._ranks.values():
            if not rank.has_come:
                rank.process.kill()
            rank.process.join(FAREWELL_SECONDS)
        return [self._notes[seat].result for seat in self._members]

    def _hold_meeting(self) -> None:
        """Deal out the parts of the next generation."""
        if self._generation >= 0 or self._lost:
            self._recover()
        self._generation += 1
        self._lost.clear()
        self._cause = ""
        self._is_recalled = False
        self._met = set(self._notes)
        self._members = tuple(sorted(self._notes)[: self._plan.size])
        self._board.clear()
        port = self._notes[self._members[0]].port
        for rank, seat in enumerate(self._members):
            del self._notes[seat]
            with suppress(OSError):  # it is lost, which the next look finds
                self._ranks[seat].line.send(self._assignment(rank, port))

    def _recover(self) -> None:
        """Choose the plan for the ranks that are left, and what they go on from."""
        before = self._plan
        self._complete_last_loss()
        self._count_failure()
        self._choose_plan()
        self._snapshots.find()
        loss = RankLoss(
            max(0, self._steps_done),
            tuple(sorted(self._lost)),
            self._cause,
            self._lost_at,
            before.text,
            self._plan.text,
            has_snapshot=bool(self._snapshots.newest),
        )
        self._losses.append(loss)
        if self._plan != before:
            self._snapshots.change(self._plan.size)
        new = "" if self._plan == before else f" under {self._plan.text}"
        say(f"plait: {self._cause}; {len(self._notes)} ranks go on{new}")

    def _complete_last_loss(self) -> None:
        """Note how the generation that ends now had gone on after the loss before it."""
        if self._losses:
            board = self._board
            self._losses[-1] = replace(self._losses[-1], resumed=board.resumed, moved=board.moved)

    def _count_failure(self) -> None:
        """A meeting without a loss is a restart too, so that their number is bounded."""
        self._steps_done = max(self._board.done(seat) for seat in range(self._num_seats))
        if self._lost or self._is_recalled:
            return
        reason = next(note.reason for note in self._notes.values() if note.reason)
        if not self._restarts:
            raise RankFailed(reason)
        self._restarts -= 1
        self._cause = reason
        self._lost_at = time.monotonic()

    def _choose_plan(self) -> None:
        chosen = self._plans.of(len(self._notes))
        if chosen is None:
            raise RankFailed(
                f"{self._cause}; no plan of [recovery] replan fits the {len(self._notes)} ranks "
                "that are left"
            )
        self._plan = chosen

    def _assignment(self, rank: int, port: int) -> Assignment:
        return Assignment(
            self._generation,
            rank,
            self._plan,
            self._members,
            (LOOPBACK, port),
            self._snapshots.parts,
            self._snapshots.newest,
            tuple(self._losses),
        )
