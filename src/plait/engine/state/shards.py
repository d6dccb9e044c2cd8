"""The shards of one rank: its elements of every parameter, gradient and buffer of the model.

Saving, loading, the reading of pretrained weights and proofs all take them from here. A data
strategy knows shards of the tensors that this rank has. `LocalParameters.shard` finds their place
in those of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from plait.engine.state.local_parameters import LocalParameters
from plait.mesh import Shard
from plait.mesh.boxes import Box
from plait.parallel.data import DataStrategy, OptimizerShard


def optimizer_shards(
    strategy: DataStrategy, holding: LocalParameters
) -> Iterator[tuple[OptimizerShard, Shard]]:
    """Each shard that this rank's optimizer updates, with its values (numel,) in master
    precision.
    """
    for piece in strategy.pieces:
        yield piece, holding.shard(piece.part.shard(piece.value))


def frozen_shards(strategies: Iterable[DataStrategy], holding: LocalParameters) -> list[Shard]:
    """The shards of parameters that no optimizer updates."""
    known = list(strategies)
    sharded = sharded_names(known)
    return [
        *(holding.shard(local) for each in known for local in each.frozen_shards()),
        *(
            tensor_shard(name, param, holding)
            for name, param in holding.params.items()
            if not param.requires_grad and name not in sharded
        ),
    ]


def sharded_names(strategies: Iterable[DataStrategy]) -> set[str]:
    """The frozen parameters whose memory belongs to a strategy, and not to the modules."""
    return {
        slot.name
        for strategy in strategies
        for state in strategy.frozen_states
        for slot in state.bucket.slots
    }


def with_decoded(
    strategies: Iterable[DataStrategy], holding: LocalParameters, *, trained: bool = False
) -> list[Shard]:
    """The shards of frozen parameters, or of all with `trained`.

    The numbers of those that are kept in codes are made for this list.
    """
    known = list(strategies)
    held = parameter_shards(known, holding) if trained else frozen_shards(known, holding)
    decoded = (local for each in known for local in each.decoded_shards())
    return [*held, *map(holding.shard, decoded)]


def parameter_shards(strategies: Iterable[DataStrategy], holding: LocalParameters) -> list[Shard]:
    """All shards of parameters, trainable ones in master precision and first."""
    known = list(strategies)
    trained = [shard for each in known for _, shard in optimizer_shards(each, holding)]
    return [*trained, *frozen_shards(known, holding)]


def empty_shards(holding: LocalParameters) -> Iterator[Shard]:
    """The trainable parameters without elements. No strategy has a place for them, but a model has
    their names.
    """
    for name, param in holding.params.items():
        shape = holding.shapes[name]
        if param.requires_grad and not math.prod(shape) and name not in holding.tied_copies:
            yield Shard.whole(name, torch.zeros(shape, dtype=param.dtype))


def module_shards(holding: LocalParameters) -> list[Shard]:
    """The parameters as the modules have them, where they have memory."""
    return [
        tensor_shard(name, param, holding)
        for name, param in holding.params.items()
        if param.untyped_storage().nbytes() > 0
    ]


def buffer_shards(holding: LocalParameters) -> list[Shard]:
    """The buffers of this rank's modules that are part of the model's state."""
    return [tensor_shard(name, buffer) for name, buffer in holding.buffers().items()]


def gradient_shards(
    strategy: DataStrategy, divisor: float, holding: LocalParameters
) -> list[Shard]:
    """The gradients (numel,) that this rank's optimizer will see, divided by `divisor`.

    Parameters without a gradient are left out.
    """
    shards = []
    for piece, shard in optimizer_shards(strategy, holding):
        grad = piece.value.grad
        if grad is not None:
            shards.append(shard.like(shard.name, grad.detach() / divisor))
    return shards


def tensor_shard(name: str, tensor: Tensor, holding: LocalParameters | None = None) -> Shard:
    """All elements (numel,) of a tensor [...] that this rank has; a box of the model's where it is
    split.
    """
    shape = tuple(tensor.shape)
    values = tensor.detach().reshape(-1)
    local = Shard(name, shape, Box.whole(shape), 0, tensor.numel(), values)
    return local if holding is None else holding.shard(local)
