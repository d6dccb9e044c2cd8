"""Saves of one engine that are written while training goes on, one after the other.

They share the list of shards, the agreement of the ranks, and the memory of the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plait.checkpoint.agreement import Agreement
from plait.checkpoint.behind import BackgroundSave, Room
from plait.checkpoint.write import prepare
from plait.engine.state.listed import ListedShards
from plait.engine.state.saving import average_buffers, meta_of
from plait.engine.state.training import TrainingState
from plait.values import JsonObject


class SavesBehind:
    """The saves of one engine."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._listed = ListedShards(state)
        self._agreement = Agreement()
        self._room = Room()

    def begin(self, path: Path, meta: JsonObject, then: Callable[[], None]) -> BackgroundSave:
        """Begin to write the checkpoint `path`. Collective.

        The save before it has ended. The state may change once this one is settled. `then` is
        called on rank 0 when it is published.
        """
        state = self._state
        world = state.world
        average_buffers(state)
        prepared = prepare(
            path,
            self._listed.shards(),
            {**meta, **meta_of(state)},
            rank=world.rank,
            world_size=world.size,
            gather=world.axis("world").gather_objects,
            agreement=self._agreement,
        )
        return BackgroundSave(prepared, then, self._room)
