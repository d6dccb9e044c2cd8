"""The list of a state's shards, made again only where their memory has changed.

A list takes tens of microseconds a tensor, and a run that keeps every step needs one each step. The
tensors behind it rarely change: strategies and optimizers update them in place. Of the facts that
are no tensors, those that no step changes are found once. Another plan has another engine.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from plait.engine.state.copies import ShardList
from plait.engine.state.saving import (
    lasting_meta_of,
    lasting_shards_of,
    passing_meta_of,
    saved_buffers,
)
from plait.engine.state.shards import buffer_shards
from plait.engine.state.training import TrainingState
from plait.engine.state.trees import flat
from plait.mesh import Shard
from plait.values import JsonObject

Mark = int | float | str
"""The memory of a tensor, or the value of what is none."""


class ListedShards:
    """The shards of one engine's state, as a checkpoint has them."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._marks: list[Mark] | None = None
        self._lasting: list[Shard] = []
        self._lasting_meta: JsonObject | None = None

    def shards(self) -> list[Shard]:
        """Shards that change in an update alone; those of buffers are copies, as forwards write
        them.
        """
        marks = _marks(self._state)
        if marks != self._marks:
            self._lasting = lasting_shards_of(self._state)
            self._marks = marks if self._are_views() else None
        return [*self._lasting, *map(_copied, saved_buffers(self._state))]

    def own_buffers(self) -> list[Shard]:
        """Copies of all buffers that this rank has."""
        return [_copied(shard) for shard in buffer_shards(self._state.holding)]

    def meta(self) -> JsonObject:
        """The facts of the state that are no tensors."""
        if self._lasting_meta is None:
            self._lasting_meta = lasting_meta_of(self._state)
        return {**self._lasting_meta, **passing_meta_of(self._state)}

    def _are_views(self) -> bool:
        """Whether each shard lies in the memory of the state, and is no copy of a part of it."""
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(self._state)}
        return all(
            shard.values.untyped_storage().data_ptr() in known
            for shard in self._lasting
            if shard.numel
        )


def listed_of(state: TrainingState) -> ShardList:
    """The list of a state's shards, which its snapshots and its checkpoints share."""
    return state.copies.listed(partial(ListedShards, state))


def _copied(shard: Shard) -> Shard:
    return replace(shard, values=shard.values.clone())


def _held(state: TrainingState) -> list[object]:
    """Parameters and optimizer state of this rank, and what else an optimizer keeps."""
    kept = state.update.optimizer.state
    held: list[object] = []
    for piece in state.strategy.pieces:
        held.append(piece.value)
        held.extend(flat(kept.get(piece.value, {})).values())
        held.extend(state.update.counts.of(piece.value).values())
        held.extend(state.driver.extra_state(piece).values())
    held.extend(one for one in state.holding.params.values() if not one.requires_grad)
    return held


def _tensors(state: TrainingState) -> list[Tensor]:
    return [one for one in _held(state) if isinstance(one, Tensor)]


def _marks(state: TrainingState) -> list[Mark]:
    """The place of each tensor, and the value of each number: the list depends on them."""
    held = _held(state)
    tensors = [one for one in held if isinstance(one, Tensor)]
    marks: list[Mark] = [*map(Tensor.data_ptr, tensors), *map(Tensor.numel, tensors)]
    if len(tensors) < len(held):
        marks.extend(str(one) for one in held if not isinstance(one, Tensor))
    return marks
