"""Copies of an engine's state that are made beside a step, by other threads.

A forward and a backward only read parameters and optimizer state. So a copy may go on until the
gradients of the next step are summed. It ends before that sum, and not before the update alone.
No rank can then be two steps ahead of the copy of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from plait.mesh import Shard
from plait.values import JsonObject


class ShardList(Protocol):
    """The list of a state's shards, as `plait.engine.state.listed` makes it."""

    def shards(self) -> list[Shard]:
        """The shards of a checkpoint."""

    def own_buffers(self) -> list[Shard]:
        """Copies of all buffers that this rank has."""

    def meta(self) -> JsonObject:
        """The facts of the state that are no tensors."""


class CopiesBeside:
    """The copies of one engine's state that are under way, and the list of its shards."""

    def __init__(self) -> None:
        self._listed: ShardList | None = None
        self._waits: list[Callable[[], None]] = []

    def listed(self, make: Callable[[], ShardList]) -> ShardList:
        """The list of the shards to copy, which `make` makes once."""
        if self._listed is None:
            self._listed = make()
        return self._listed

    def add(self, wait: Callable[[], None]) -> None:
        """Have `wait` called before the state changes; it returns when the copy is made."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Return when every copy is made."""
        while self._waits:
            self._waits.pop()()
