"""Snapshots: the state of a step in memory, from which a run goes on after a loss.

Every rank copies its shards of the model's state, as a checkpoint has them, into memory that the
launcher holds. Two files a rank take turns, so that one of them is whole at any moment. Running
statistics, which each rank keeps of its own samples, are there as each rank has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.entry import RANK_PREFIX
from plait.checkpoint.memory import MemoryCheckpoint, MemoryFile
from plait.checkpoint.room import Room, side_stream_of
from plait.engine.state.listed import listed_of
from plait.engine.state.saving import load_from
from plait.engine.state.shards import buffer_shards
from plait.engine.state.training import TrainingState
from plait.mesh import Shard
from plait.values import JsonObject


class Snapshots:
    """The files of one rank for the snapshots of its state.

    Attributes:
        num_bytes: of the newest snapshot.
    """

    def __init__(self, paths: Sequence[Path], state: TrainingState) -> None:
        self.num_bytes = 0
        side = side_stream_of(state.world.device)
        room = None if side is None else Room(side)
        self._files = [MemoryFile(path, room) for path in paths]
        self._state = state
        self._listed = listed_of(state)

    def content(self, turn: int) -> Tensor:
        """The bytes (num_bytes,) uint8 of the file whose turn it was, once it is whole: a view of
        its memory.
        """
        return self._files[turn % len(self._files)].content()

    def take(self, turn: int, meta: JsonObject) -> None:
        """Copy the state into the file whose turn it is."""
        self.begin(turn, meta)()

    def begin(self, turn: int, meta: JsonObject) -> Callable[[], None]:
        """Prepare a copy of the state into the file whose turn it is; the answer makes it.

        It may be made in another thread, until the state changes. The copy before it has ended.
        """
        own = [
            Shard.whole(RANK_PREFIX + shard.name, shard.values)
            for shard in self._listed.own_buffers()
        ]
        file = self._files[turn % len(self._files)]
        shards = [*self._listed.shards(), *own]
        copy = file.begin(self._state.step_index, shards, {**meta, **self._listed.meta()})
        self.num_bytes = file.num_bytes
        return copy


def restore(state: TrainingState, paths: Sequence[Path]) -> JsonObject:
    """Fill the engine from the snapshot in these files, by rank; returns its meta data. Collective.

    Under the plan that wrote it, each rank gets its own statistics back, else their mean.
    """
    checkpoint = MemoryCheckpoint(paths)
    is_alike = checkpoint.meta["plan"] == str(state.plan)
    meta = load_from(state, checkpoint)
    with torch.no_grad():
        for shard in buffer_shards(state.holding):
            if not shard.values.is_floating_point():
                continue
            own = checkpoint.mean_of_ranks(shard.name)
            if is_alike:
                own = checkpoint.of_rank(state.world.rank, shard.name)
            if own is not None:
                shard.values.copy_(own)
    return meta
