"""The part of a process in one generation of a run that is kept alive."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from plait.comm.network import store_at
from plait.errors import RankFailed
from plait.launcher.board import Waited
from plait.launcher.seat import Assignment, Seat
from plait.run.copier import Copier
from plait.run.costs import WaitedFor
from plait.run.hooks import Hook, RunStart, StepDone
from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.comm import World
    from plait.comm.severance import Severance
    from plait.config.sections import Recovery
    from plait.engine.engine import Engine
    from plait.plan import Plan

T = TypeVar("T")
RANKS_ARE_BACK = "lost ranks are back"


@dataclass(frozen=True)
class RankContext:
    """The part of this process in one generation of a run."""

    seat: Seat
    assignment: Assignment
    severance: Severance
    copier: Copier = field(default_factory=Copier)
    joined: list[World] = field(default_factory=list)

    def join(self, plan: Plan, silent_seconds: float, backend: str = "auto") -> World:
        """The world of this generation, by a backend of `comm.init`. Collective."""
        from torch._C._distributed_c10d import PrefixStore

        from plait.engine.build import join_world

        assignment = self.assignment
        host, port = assignment.store
        timeout = timedelta(seconds=silent_seconds)
        with self.severance.collecting():
            store = store_at(host, port, timeout, lambda: self.severance.is_cut)
        world = join_world(
            plan,
            silent_seconds,
            rank=assignment.rank,
            store=PrefixStore(f"generation/{assignment.generation}", store),
            severance=self.severance,
            backend=backend,
        )
        self.joined.append(world)
        return world

    def meet(self) -> None:
        """Say in the record of this rank that it has left its world."""
        for world in self.joined:
            world.recorder.flight.meet()

    def hook(self, recovery: Recovery) -> RankProgress:
        """The hook that tells the launcher how far this rank is, and takes snapshots.

        A run that goes back to them has one before its first step. It waits for each, so that
        what a step does to its weights is in none.
        """
        every = recovery.steps_between_snapshots
        goes_back = recovery.on_nan == "back"
        keeps_start = goes_back and not self._has_snapshot
        return RankProgress(self, every, keeps_start=keeps_start, is_beside=not goes_back)

    def waited_for(self, what: Waited) -> WaitedFor:
        """The account of what the first rank's steps wait for, over all generations."""
        is_first_rank = self.assignment.rank == 0
        return WaitedFor(what, self.seat.board if is_first_rank else None)

    @property
    def _has_snapshot(self) -> bool:
        """Whether the files of this generation hold the snapshot that it goes on from."""
        held = {path for files in self.assignment.parts for path in files}
        return bool(held.intersection(self.assignment.snapshot))

    @property
    def is_first(self) -> bool:
        """Whether this is the first generation of the run."""
        return self.assignment.generation == 0

    def restore(self, engine: Engine) -> JsonObject | None:
        """Fill the engine from the newest snapshot; returns its meta data, None where there is
        none. Collective.
        """
        from plait.engine.state.snapshots import restore

        if not self.assignment.snapshot:
            return None
        return restore(engine, self.assignment.snapshot)

    def recoveries(self) -> list[JsonObject]:
        """The recoveries of the run until now."""
        board = self.seat.board
        losses = list(self.assignment.losses)
        if losses:
            losses[-1] = replace(losses[-1], resumed=board.resumed, moved=board.moved)
        return [loss.as_dict() for loss in losses]


class RankProgress(Hook):
    """Tells the launcher of every step that is done, and keeps its state.

    A snapshot is whole before the next step is summed over the ranks. Once a step counts as done on
    any rank, all can go on from the one before it. The hook is also the judge of the run's end
    (`plait.run.ending`).

    Attributes:
        signal: the signal that has ended the run; 0 for none.
    """

    def __init__(
        self, place: RankContext, every: int, *, keeps_start: bool, is_beside: bool
    ) -> None:
        self.signal = 0
        self._is_beside = is_beside
        self._copier = place.copier
        self._keeps_start = keeps_start
        self._seat = place.seat
        self._every = every
        self._waited = place.waited_for(Waited.SNAPSHOTS)
        self._copying = place.waited_for(Waited.COPYING)
        self._paths = place.assignment.parts[place.assignment.rank]

    def on_start(self, start: RunStart) -> None:
        """Say where this generation begins."""
        from plait.engine.state.snapshots import Snapshots

        self._engine = start.engine
        self._loader = start.loader
        self._snapshots = Snapshots(self._paths, start.engine)
        self._seat.board.resume(self._seat.number, start.first_step - 1)
        if self._every and self._keeps_start:
            self._take(start.first_step - 1)

    def ends_before(self, step: int, leave: Callable[[], None]) -> bool:
        """Whether all ranks end before this step. Raises `RankFailed` where they go on together
        with ranks that have come back.

        Without snapshots they end with a checkpoint, to go on from.
        """
        if not self._seat.ends_before(step):
            return False
        self.signal = self._seat.reason_of_end()
        if self.signal or not self._every:
            return True
        self._engine.settle()
        if step % self._every:
            self._take(step)
        self._wait_for_copy()
        raise RankFailed(RANKS_ARE_BACK)

    @property
    def known_signal(self) -> int:
        """The signal that this rank knows of; 0 for none."""
        return self._seat.board.signal

    def starts_again(self) -> bool:
        """Always false: the launcher knows which ranks are done."""
        return False

    def needs_state(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def on_step(self, done: StepDone) -> None:
        """Keep the state of the step, and say that it is done."""
        if self._every and done.step % self._every == 0:
            self._take(done.step)
        self._seat.board.finish(self._seat.number, done.step)

    def before_rollback(self) -> None:
        """The newest snapshot is whole before it is looked for."""
        self._wait_for_copy()

    def on_end(self) -> None:
        """The last snapshot is whole."""
        self._wait_for_copy()

    def _take(self, step: int) -> None:
        """Copy the state beside the next step, until that sums its gradients."""
        self._wait_for_copy()
        began = time.perf_counter()
        meta = {"loader": self._loader.state_dict()}
        turn = -(-step // self._every)  # one that is out of turn may not lie on the one before
        self._copier.begin(self._snapshots.begin(turn, meta))
        self._waited.add(time.perf_counter() - began)
        if self._is_beside:
            self._engine.copies.add(self._wait_for_copy)
        else:
            self._wait_for_copy()

    def _wait_for_copy(self) -> None:
        """Wait until the snapshot is whole."""
        began = time.perf_counter()
        self._copying.add(self._copier.wait())
        self._waited.add(time.perf_counter() - began, count=0)

    def numbers(self) -> JsonObject:
        """The cost of the snapshots of the run."""
        if not self._every:
            return {}
        waited = self._waited
        cost = {
            "count": waited.count,
            "seconds": waited.seconds,
            "processor_seconds": self._copying.seconds,
            "bytes": self._snapshots.num_bytes,
        }
        return {"snapshots": cost}


def closing(world: World, act: Callable[[], T]) -> T:
    """The result of `act`. When it fails the world is left without a farewell."""
    try:
        return act()
    except BaseException:
        world.close(together=False)
        raise
