"""The time that a run's steps have waited for one thing, over all of its generations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.launcher.board import Waited

if TYPE_CHECKING:
    from plait.launcher.board import Board


class WaitedFor:
    """A count and its seconds: on a board, which outlives this process, else in memory."""

    def __init__(self, what: Waited, board: Board | None = None) -> None:
        self._what = what
        self._board = board
        self._count = 0
        self._seconds = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Note so many of it, for which steps waited so long in all."""
        if self._board is not None:
            self._board.add_wait(self._what, seconds, count)
        self._count += count
        self._seconds += seconds

    @property
    def count(self) -> int:
        """The number of them."""
        return self._count if self._board is None else self._board.waits(self._what)[0]

    @property
    def seconds(self) -> float:
        """The seconds that steps waited."""
        return self._seconds if self._board is None else self._board.waits(self._what)[1]
