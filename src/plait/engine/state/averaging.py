"""Means of buffers and of optimizer states that went apart, on which ranks agree for a save."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.engine.axes import data_axis
from plait.engine.state.shards import buffer_shards
from plait.engine.state.training import TrainingState
from plait.torch_internals import place_state
from plait.values import JsonMapping, JsonObject


def average_optimizer_state(state: TrainingState) -> None:
    """Let optimizers that went apart between two outer steps agree on the mean of their states.

    A rank that has come since has no state yet, and takes the mean of the others. Collective.
    """
    strategy = state.strategy
    axis = state.world.axis("dp")
    if state.driver.is_synchronous or strategy.replicas.count == 1:
        return
    optimizer = state.update.optimizer
    own = [_described(optimizer.state.get(piece.value, {})) for piece in strategy.pieces]
    of_ranks: list[list[JsonObject]] = axis.gather_objects(own)
    for index, piece in enumerate(strategy.pieces):
        holders = [described[index] for described in of_ranks if described[index]]
        if not holders:
            continue
        values = optimizer.state[piece.value]
        for key, about in sorted(holders[0].items()):
            if not isinstance(about, EmptyTensor):
                values.setdefault(key, about)
                continue
            if key not in values:
                values[key] = place_state(about.zeros(), piece.value, optimizer)
            if about.dtype.is_floating_point:
                total = values[key].to(state.world.device)
                axis.all_reduce(total).wait()
                values[key].copy_(total.div_(len(holders)))


@dataclass(frozen=True)
class EmptyTensor:
    """A tensor's shape and type, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self) -> Tensor:
        """A tensor of zeros of the shape of this one, on the host."""
        return torch.zeros(self.shape, dtype=self.dtype)


def _described(values: JsonMapping) -> JsonObject:
    return {
        key: EmptyTensor(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for key, value in values.items()
    }


def average_buffers(state: TrainingState) -> None:
    """Let running statistics, which every rank keeps of its own samples, be the mean over the data
    axis. Collective.
    """
    axis = data_axis(state.world)
    for shard in buffer_shards(state.holding):
        if axis.size > 1 and shard.values.is_floating_point():
            mean = shard.values / axis.size
            axis.all_reduce(mean, control=True).wait()
            shard.values.copy_(mean)
