"""Records of an engine's ranks: each rank records its shards, and the shards of all are joined.

Gradients are taken at the door of the optimizer, by a hook on `optimizer.step` itself. So the
engine's changes before it (sum, divide, clip) are included. Parts that several ranks hold must
agree to the last bit. Where they do not, the views of all ranks are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from plait.engine.engine import Engine
from plait.engine.state.shards import gradient_shards, module_shards
from plait.mesh import Shard
from plait.values import PyTree
from plait.verify.record.observation import (
    Observation,
    RankView,
    Record,
    Shards,
    Tensors,
    same_memory,
)
from plait.verify.record.samples import Samples, samples_of


@dataclass(frozen=True)
class RankStep:
    """One step on one rank. `count` is the divisor of the loss. `replicas` are the parameters of
    its next forward, and `published` those that it keeps in another precision than their masters.
    `buffers` are whole.
    """

    loss: float
    grad_norm: float
    count: float
    grads: Sequence[Shard]
    params: Sequence[Shard]
    replicas: Sequence[Shard]
    buffers: Tensors = field(default_factory=dict)
    published: Sequence[Shard] = ()
    samples: Samples = ()


@dataclass(frozen=True)
class RankRecord:
    """A run on one rank."""

    start: Sequence[Shard]
    steps: Sequence[RankStep]


def record_rank(engine: Engine, batches: Iterable[PyTree], steps: int) -> RankRecord:
    """Train `steps` steps and keep what this rank holds after each. Collective."""
    seen: list[list[Shard]] = []
    hook = engine.update.optimizer.register_step_pre_hook(
        lambda *_: seen.append(gradients_of_engine(engine))
    )
    start = parameters_of(engine)
    steps_done = []
    for batch in islice(batches, steps):
        seen.clear()
        result = engine.step(batch, trace=False)
        grads = seen[0] if seen else []
        steps_done.append(
            RankStep(
                result.loss,
                result.grad_norm,
                result.count,
                grads,
                parameters_of(engine),
                _replicas(engine),
                buffers_of(engine),
                _published(engine),
                samples_of(batch),
            )
        )
    hook.remove()
    return RankRecord(start, steps_done)


def gradients_of_engine(engine: Engine) -> list[Shard]:
    """Gradients as the optimizer will see them: a fused kernel divides by its scale itself."""
    optimizer: Any = engine.update.optimizer
    scale = getattr(optimizer, "grad_scale", None)
    divisor = 1.0 if scale is None else float(scale)
    return [_copy(shard) for shard in gradient_shards(engine.strategy, divisor, engine.holding)]


def parameters_of(engine: Engine) -> list[Shard]:
    """Copies of the shards of this rank."""
    return [_copy(shard) for shard in engine.local_parameters()]


def buffers_of(engine: Engine) -> Tensors:
    """Copies of the persistent buffers that this rank holds whole."""
    shapes = engine.holding.shapes
    return {
        name: buffer.to("cpu", copy=True)
        for name, buffer in engine.holding.buffers().items()
        if tuple(buffer.shape) == tuple(shapes[name])
    }


def _replicas(engine: Engine) -> list[Shard]:
    """The parameters as the module has them; ZeRO-3 keeps none between steps.

    Those whose memory is the masters' own are left out: they are the same numbers.
    """
    masters = {piece.name: piece.value.dtype for piece in engine.strategy.pieces}
    known = {_memory(shard) for shard in engine.local_parameters()}
    shards = module_shards(engine.holding)
    return [
        _copy(shard)
        for shard in shards
        if masters.get(shard.name, shard.values.dtype) == shard.values.dtype
        and _memory(shard) not in known
    ]


def _memory(shard: Shard) -> tuple[str, int, int, torch.dtype]:
    """The memory of a shard's values."""
    values = shard.values
    return shard.name, values.data_ptr(), values.numel(), values.dtype


def _published(engine: Engine) -> list[Shard]:
    """The trained parameters as the module has them, where their masters are wider."""
    masters = {shard.name: shard.values.dtype for shard in engine.local_parameters()}
    trained = {name for name, param in engine.holding.params.items() if param.requires_grad}
    return [
        _copy(shard)
        for shard in module_shards(engine.holding)
        if shard.name in trained and masters.get(shard.name, torch.float32) != shard.values.dtype
    ]


def join(ranks: Sequence[RankRecord]) -> Record:
    """One record from those of all ranks, in rank order. Where ranks start apart, the start is an
    odd one's.
    """
    start = assembled([rank.start for rank in ranks])
    for odd in _views([rank.start for rank in ranks], start).values():
        start |= {name: value for name, value in odd.items() if not torch.equal(value, start[name])}
    return Record(
        start,
        [_join_step([rank.steps[step] for rank in ranks]) for step in range(len(ranks[0].steps))],
    )


def _join_step(ranks: Sequence[RankStep]) -> Observation:
    grads = assembled([rank.grads for rank in ranks])
    params = assembled([rank.params for rank in ranks])
    odd_grads = _views([rank.grads for rank in ranks], grads)
    odd_params = _views([[*rank.params, *rank.replicas] for rank in ranks], params)
    views = {
        rank: RankView(odd_grads.get(rank, {}), odd_params.get(rank, {}))
        for rank in range(len(ranks))
        if rank in odd_grads or rank in odd_params
    }
    odd_loss = max(ranks, key=lambda rank: abs(rank.loss - ranks[0].loss))
    odd_norm = max(ranks, key=lambda rank: abs(rank.grad_norm - ranks[0].grad_norm))
    whole: dict[str, Tensor | None] = {name: grads.get(name) for name in params}
    shards = [{shard.name: _range(shard) for shard in rank.grads} for rank in ranks]
    return Observation(
        odd_loss.loss,
        whole,
        params,
        odd_norm.grad_norm,
        ranks=views,
        shards=_if_split(shards, grads),
        count=ranks[0].count,
        buffers=_mean([rank.buffers for rank in ranks]),
        samples=[rank.samples for rank in ranks],
    )


def _copy(shard: Shard) -> Shard:
    return shard.like(shard.name, shard.values.to("cpu", copy=True))


def _range(shard: Shard) -> tuple[int, int]:
    """[start, stop) in the whole tensor where the elements follow each other there.

    Else the whole tensor, of which they are some.
    """
    index = shard.index()
    if isinstance(index, slice):
        return shard.start, shard.stop
    return 0, torch.Size(shard.global_shape).numel()


def _mean(ranks: Sequence[Tensors]) -> Tensors:
    """Each buffer as a checkpoint has it: the mean of what ranks keep of their own samples. One of
    whole numbers is that of the rank that is furthest from the first.
    """
    means: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        values = [rank[name] for rank in ranks if name in rank]
        if values[0].is_floating_point():
            means[name] = torch.stack(values).mean(0) if len(values) > 1 else values[0]
        else:
            odd = [value for value in values if not torch.equal(value, values[0])]
            means[name] = odd[0] if odd else values[0]
    return means


def _if_split(shards: Shards, grads: Tensors) -> Shards:
    """The ranges, where any is less than the whole tensor or missing on a rank."""
    whole = {name: (0, grad.numel()) for name, grad in grads.items()}
    return [] if all(dict(shard) == whole for shard in shards) else shards


def assembled(ranks: Sequence[Sequence[Shard]]) -> dict[str, Tensor]:
    """Whole tensors by name, in the shape of the model's. Each element is from the first rank that
    has it; NaN where none has.

    Where the first has all of it, the tensor is that rank's own.
    """
    whole: dict[str, Tensor] = {}
    known: dict[str, Tensor] = {}
    complete: set[str] = set()
    for shards in ranks:
        for shard in shards:
            if shard.name in complete:
                continue
            index = shard.index()
            size = torch.Size(shard.global_shape).numel()
            if shard.name not in whole and _is_all(index, size):
                whole[shard.name] = shard.values
                complete.add(shard.name)
                continue
            if shard.name not in whole:
                whole[shard.name] = torch.full((size,), float("nan"), dtype=shard.values.dtype)
                known[shard.name] = torch.zeros(size, dtype=torch.bool)
            new = ~known[shard.name][index]
            whole[shard.name][index] = torch.where(new, shard.values, whole[shard.name][index])
            known[shard.name][index] = True
    shapes = {shard.name: shard.global_shape for shards in ranks for shard in shards}
    return {name: value.view(shapes[name]) for name, value in whole.items()}


def _is_all(index: slice | Tensor, size: int) -> bool:
    return isinstance(index, slice) and (index.start, index.stop) == (0, size)


def _agrees(shard: Shard, agreed: Tensor) -> bool:
    """Whether a shard is its part of the whole tensor, or the same memory."""
    whole = agreed.reshape(-1)
    if shard.values.numel() == whole.numel() and same_memory(shard.values, whole):
        return True
    return torch.equal(shard.values, whole[shard.index()])


def _views(ranks: Sequence[Sequence[Shard]], agreed: Tensors) -> dict[int, dict[str, Tensor]]:
    """The values of every rank for the names on which ranks do not agree. The result is empty where
    all agree.
    """
    odd = {
        shard.name
        for shards in ranks
        for shard in shards
        if shard.values.numel()  # one without elements may have no owner
        and not _agrees(shard, agreed[shard.name])
    }
    views: dict[int, dict[str, Tensor]] = {}
    for rank, shards in enumerate(ranks):
        for shard in shards:
            if shard.name in odd:
                view = agreed[shard.name].clone()
                own = views.setdefault(rank, {}).setdefault(shard.name, view)
                own.view(-1)[shard.index()] = shard.values
    return views
