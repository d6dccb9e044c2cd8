"""Saves of one engine that are written while training goes on, one after the other.

They share the list of shards, what the ranks know of each other, and the memory of the copy. Ranks
meet once, before the first step, for a number from which they make the name of each save.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from plait.checkpoint.behind import BackgroundSave, SaveMemory, Wanted
from plait.checkpoint.room import side_stream_of
from plait.checkpoint.token import digest
from plait.engine.state.averaging import average_buffers
from plait.engine.state.listed import listed_of
from plait.engine.state.training import TrainingState
from plait.values import JsonObject

RANDOM_DIGITS = 12


class SavesBehind:
    """The saves of one engine. Made by all ranks together."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._listed = listed_of(state)
        self._memory = SaveMemory(side_stream_of(state.world.device))
        self._num_saves = 0
        numbers: list[str] = state.world.axis("world").gather_objects(secrets.token_hex(8))
        self._number = numbers[0]

    def begin(self, path: Path, meta: JsonObject, then: Callable[[], None]) -> BackgroundSave:
        """Begin to write the checkpoint `path`. For all ranks, which need not be here at once.

        The save before it has ended. The state may change once this one is settled. `then` is
        called on rank 0 when it is published. Running statistics become their mean over the ranks.
        """
        state = self._state
        state.show_evaluated_weights()
        state.loss_modules.warn_of_what_is_left_out()
        average_buffers(state)
        self._num_saves += 1
        wanted = Wanted(
            path.absolute(),
            digest(f"{self._number} {self._num_saves}")[:RANDOM_DIGITS],
            self._listed.shards(),
            {**meta, **self._listed.meta()},
            state.world.rank,
            state.world.size,
        )
        return BackgroundSave(wanted, then, self._memory)
