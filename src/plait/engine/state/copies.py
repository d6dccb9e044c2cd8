"""Copies of an engine's state that are made beside a step, by other threads.

A forward and a backward only read parameters and optimizer state. So a copy may go on until the
gradients of the next step are summed. It ends before that sum, and not before the update alone.
No rank can then be two steps ahead of the copy of another.
"""

from __future__ import annotations

from collections.abc import Callable


class CopiesBeside:
    """The copies of one engine's state that are under way."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []

    def add(self, wait: Callable[[], None]) -> None:
        """Have `wait` called before the state changes; it returns when the copy is made."""
        self._waits.append(wait)

    def settle(self) -> None:
        """Return when every copy is made."""
        while self._waits:
            self._waits.pop()()
