"""The part of a process in one generation of a run that is kept alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from plait.launcher.seat import Assignment, Seat
from plait.run.hooks import Hook, StepDone

if TYPE_CHECKING:
    from plait.comm import World
    from plait.comm.severance import Severance
    from plait.plan import Plan


@dataclass(frozen=True)
class Place:
    """The part of this process in one generation of a run."""

    seat: Seat
    assignment: Assignment
    severance: Severance

    @property
    def signal(self) -> int:
        """The signal that asks for the end; 0 for none."""
        return self.seat.board.signal

    def ends_before(self, step: int) -> bool:
        """See `Seat.ends_before`."""
        return self.seat.ends_before(step)

    def join(self, plan: Plan, silent_seconds: float) -> World:
        """The world of this generation. Collective."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        from plait.engine.build import join_world

        assignment = self.assignment
        host, port = assignment.store
        timeout = timedelta(seconds=silent_seconds)
        with self.severance.collecting():
            store = TCPStore(host, port, is_master=False, timeout=timeout)
        return join_world(
            plan,
            silent_seconds,
            rank=assignment.rank,
            store=PrefixStore(f"generation/{assignment.generation}", store),
            severance=self.severance,
        )

    def hooks(self) -> list[Hook]:
        """The hook that tells the launcher how far this rank is."""
        return [_Progress(self.seat)]


class _Progress(Hook):
    """Tells the launcher of every step that is done."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def on_step(self, done: StepDone) -> None:
        """Say that the step is done."""
        self._seat.board.finish(self._seat.number, done.step)


def closing(world: World, act: Callable[[], Any]) -> Any:
    """The result of `act`. When it fails the world is left without a farewell."""
    try:
        return act()
    except BaseException:
        world.close(together=False)
        raise
