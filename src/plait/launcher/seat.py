"""One rank's side of a launcher that keeps the run alive (`plait.launcher.keeper`).

A process has a *seat*, its number among those that were started. At a meeting the launcher deals
out ranks. Seats that are lost have none, and seats that a plan leaves over wait. Whenever a rank is
lost the others come back to the next meeting, with the same process and another group.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.comm.network import listening_store
from plait.launcher.board import NOTHING, Board
from plait.launcher.hearing import SIGNALS, Echoes
from plait.values import JsonObject

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOK_SECONDS = 0.02
POLITE_SECONDS = 0.001


@dataclass(frozen=True)
class LaunchPlan:
    """A plan, as a text that the launcher does not read, and the ranks that it needs."""

    text: str
    size: int


@dataclass(frozen=True)
class RankLoss:
    """A moment at which ranks were lost, and the generation that followed.

    Attributes:
        step: the steps that the furthest rank had done.
        moment: of the loss, on the monotonic clock, in seconds.
        resumed: the steps from which the run went on; `NOTHING` where it did not get so far.
        moved: the moment of the first step that was then done; below 0 for none.
        has_snapshot: whether it went on from a snapshot, and not from a checkpoint or its start.
    """

    step: int
    ranks: tuple[int, ...]
    cause: str
    moment: float
    before: str
    after: str
    resumed: int = NOTHING
    moved: float = -1.0
    has_snapshot: bool = False

    @property
    def source(self) -> str:
        """The state from which the run went on."""
        if self.has_snapshot:
            return "snapshot"
        return "checkpoint" if self.resumed > 0 else "start"

    def as_dict(self) -> JsonObject:
        """The recovery as summaries tell it."""
        return {
            "step": self.step,
            "lost_ranks": list(self.ranks),
            "cause": self.cause,
            "seconds": self.moved - self.moment if self.moved >= 0 else None,
            "plan_before": self.before,
            "plan_after": self.after,
            "steps_repeated": max(0, self.step - self.resumed) if self.resumed >= 0 else None,
            "source": self.source,
            "moment": time.time() - (time.monotonic() - self.moment),
        }


@dataclass(frozen=True)
class Assignment:
    """The part of one process until the next meeting.

    Attributes:
        members: the seats of the ranks, by rank.
        parts: by rank, the files for this plan's snapshots in memory.
        snapshot: by rank of the plan that wrote it, the files of the newest whole snapshot.
        losses: all recoveries of the run, this one included.
    """

    generation: int
    rank: int
    plan: LaunchPlan
    members: tuple[int, ...]
    store: tuple[str, int]
    parts: tuple[tuple[Path, ...], ...]
    snapshot: tuple[Path, ...] = ()
    losses: tuple[RankLoss, ...] = ()


@dataclass(frozen=True)
class Note:
    """A word to the launcher at a meeting: the result of a rank that is done, or why it comes.

    `port` is that of the process's own store, at which a generation meets whose first rank it is.
    """

    reason: str = ""
    result: Any = None
    is_done: bool = False
    port: int = 0


class Seat:
    """This process's seat. `goes_on`: whether the run goes on without a rank that is lost."""

    def __init__(self, number: int, board: Board, launcher: Connection, goes_on: bool) -> None:
        self.number = number
        self.goes_on = goes_on
        self.board = board
        self._launcher = launcher
        self._generation = NOTHING
        self._members: tuple[int, ...] = ()
        self._has_heard = False
        self._echoes = Echoes()
        self._store: TCPStore | None = None

    def meet(self, note: Note) -> Assignment | None:
        """Wait for the other ranks; None when the run is done."""
        self._launcher.send(replace(note, port=self._store_port()))
        assignment: Assignment | None = self._launcher.recv()
        if assignment is not None:
            self._generation = assignment.generation
            self._members = assignment.members
            os.environ.update(_variables(assignment))
        return assignment

    def _store_port(self) -> int:
        """The port of this process's store. The launcher keeps none, so that it loads no torch."""
        if self._store is None:
            self._store = listening_store()
        return self._store.port

    def listen(self) -> None:
        """Have signals of this process end the run, after a checkpoint."""
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        """Ask for the end. A second signal ends this process, and so the run, at once."""
        if self._echoes.has(number):
            return
        if self._has_heard:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._has_heard = True
        self.board.ask_to_end(number)

    @contextmanager
    def watching(self, cut: Callable[[], None]) -> Iterator[None]:
        """Call `cut` from another thread when a rank of this generation is lost."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_SECONDS):
                if self.is_void:
                    cut()
                    return

        thread = threading.Thread(target=watch, name="plait-loss-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @property
    def is_void(self) -> bool:
        """Whether a rank of this generation is lost."""
        return self.board.void >= self._generation

    @property
    def is_recalled(self) -> bool:
        """Whether the ranks of this generation are to meet between two steps."""
        return self.board.recalled >= self._generation

    def ends_before(self, step: int) -> bool:
        """Whether all ranks end before this step, because a signal or the launcher asks for it.

        A rank either begins a step or says that it would end before it, never both. So all end
        before the same step, or one has begun it and the others follow.
        """
        board = self.board
        if not board.signal and not self.is_recalled:
            board.begin(self.number, step)
            return False
        board.wait_at(self.number, step)
        while not all(board.waits_at(seat) == step for seat in self._members):
            if any(board.begun(seat) >= step for seat in self._members) or self.is_void:
                board.begin(self.number, step)
                return False
            time.sleep(POLITE_SECONDS)
        return True

    def reason_of_end(self) -> int:
        """The signal for which all ranks have ended before a step; 0 where they are recalled.

        The first rank decides, since a signal may come meanwhile.
        """
        board = self.board
        if self.number == self._members[0]:
            board.decide(0 if self.is_recalled else board.signal)
        while board.decided == NOTHING and not self.is_void:
            time.sleep(POLITE_SECONDS)
        return max(0, board.decided)


def _variables(assignment: Assignment) -> dict[str, str]:
    """The variables by which torchrun would tell a rank of its world."""
    host, port = assignment.store
    size = str(assignment.plan.size)
    return {
        "RANK": str(assignment.rank),
        "LOCAL_RANK": str(assignment.rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
