"""What an engine's ranks leave behind: each rank records its parts, the parts of all are put
together.

Gradients are taken at the door of the optimizer, by a hook on `optimizer.step` itself, so that
whatever the engine does to them before (sum, divide, clip) has happened. Parts that several ranks
hold must agree to the last bit; where they do not, the views of all ranks are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from plait.engine.engine import Engine
from plait.engine.state.parts import LocalPart, local_gradients, local_replicas
from plait.verify.record.observation import Observation, RankView, Record, Shards, Tensors


@dataclass(frozen=True)
class Part:
    """Elements of one tensor, 1-D, as one rank holds them; `index` says which of the flat whole
    tensor.
    """

    name: str
    shape: tuple[int, ...]
    index: slice | Tensor
    value: Tensor

    @staticmethod
    def of(part: LocalPart, value: Tensor | None = None) -> Part:
        """A copy."""
        value = part.value if value is None else value
        return Part(part.name, part.global_shape, part.index(), value.to("cpu", copy=True))

    @property
    def range(self) -> tuple[int, int]:
        """[start, stop) where the elements follow each other; else the whole tensor, of which they
        are some.
        """
        if isinstance(self.index, slice):
            return self.index.start, self.index.stop
        return 0, torch.Size(self.shape).numel()


@dataclass(frozen=True)
class RankStep:
    """One step on one rank. `tokens` is what the loss was divided by; `replicas` are the parameters
    of its next forward, `published` those that it keeps in another precision than their masters;
    `buffers` are whole.
    """

    loss: float
    grad_norm: float
    tokens: int
    grads: Sequence[Part]
    params: Sequence[Part]
    replicas: Sequence[Part]
    buffers: Tensors = field(default_factory=dict)
    published: Sequence[Part] = ()


@dataclass(frozen=True)
class RankRecord:
    """A run on one rank."""

    start: Sequence[Part]
    steps: Sequence[RankStep]


def record_rank(engine: Engine, batches: Iterable[Any], steps: int) -> RankRecord:
    """Train `steps` steps and keep what this rank holds after each. Collective."""
    seen: list[list[Part]] = []
    hook = engine.update.optimizer.register_step_pre_hook(
        lambda *_: seen.append(_gradients(engine))
    )
    start = parameters_of(engine)
    found = []
    for batch in islice(batches, steps):
        seen.clear()
        result = engine.step(batch, trace=False)
        grads = seen[0] if seen else []
        found.append(
            RankStep(
                result.loss,
                result.grad_norm,
                result.tokens,
                grads,
                parameters_of(engine),
                _replicas(engine),
                buffers_of(engine),
                _published(engine),
            )
        )
    hook.remove()
    return RankRecord(start, found)


def _gradients(engine: Engine) -> list[Part]:
    """As the optimizer will see them: a fused kernel divides by its scale as it goes."""
    optimizer: Any = engine.update.optimizer
    scale = getattr(optimizer, "grad_scale", None)
    divisor = 1.0 if scale is None else float(scale)
    return [Part.of(part) for part in local_gradients(engine.strategy, divisor, engine.holding)]


def parameters_of(engine: Engine) -> list[Part]:
    """What this rank holds, in copies."""
    return [Part.of(part) for part in engine.local_parameters()]


def buffers_of(engine: Engine) -> Tensors:
    """Copies of the persistent buffers that this rank holds whole."""
    shapes = engine.holding.shapes
    return {
        name: buffer.to("cpu", copy=True)
        for name, buffer in engine.holding.buffers().items()
        if tuple(buffer.shape) == tuple(shapes[name])
    }


def _replicas(engine: Engine) -> list[Part]:
    """The parameters as the module has them; ZeRO-3 keeps none between steps."""
    masters = {piece.name: piece.value.dtype for piece in engine.strategy.pieces}
    parts = local_replicas(engine.holding)
    return [
        Part.of(part)
        for part in parts
        if masters.get(part.name, part.value.dtype) == part.value.dtype
    ]


def _published(engine: Engine) -> list[Part]:
    """The trained parameters as the module has them, where their masters are wider."""
    masters = {part.name: part.value.dtype for part in engine.local_parameters()}
    trained = {name for name, param in engine.holding.params.items() if param.requires_grad}
    return [
        Part.of(part)
        for part in local_replicas(engine.holding)
        if part.name in trained and masters.get(part.name, torch.float32) != part.value.dtype
    ]


def join(ranks: Sequence[RankRecord]) -> Record:
    """One record from those of all ranks, in rank order. Where ranks start apart, the start is an
    odd one's.
    """
    start = _assemble([rank.start for rank in ranks])
    for odd in _views([rank.start for rank in ranks], start).values():
        start |= {name: value for name, value in odd.items() if not torch.equal(value, start[name])}
    return Record(
        start,
        [_join_step([rank.steps[step] for rank in ranks]) for step in range(len(ranks[0].steps))],
    )


def _join_step(ranks: Sequence[RankStep]) -> Observation:
    grads = _assemble([rank.grads for rank in ranks])
    params = _assemble([rank.params for rank in ranks])
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
    shards = [{part.name: part.range for part in rank.grads} for rank in ranks]
    return Observation(
        odd_loss.loss,
        whole,
        params,
        odd_norm.grad_norm,
        ranks=views,
        shards=_if_split(shards, grads),
        count=ranks[0].tokens,
        buffers=_mean([rank.buffers for rank in ranks]),
    )


def _mean(ranks: Sequence[Tensors]) -> Tensors:
    """Each buffer as a checkpoint has it: the mean of what ranks keep of their own samples. One of
    whole numbers is that of the rank that is furthest from the first.
    """
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        values = [rank[name] for rank in ranks if name in rank]
        if values[0].is_floating_point():
            found[name] = torch.stack(values).mean(0) if len(values) > 1 else values[0]
        else:
            odd = [value for value in values if not torch.equal(value, values[0])]
            found[name] = odd[0] if odd else values[0]
    return found


def _if_split(shards: Shards, grads: Tensors) -> Shards:
    """The ranges, where any is less than the whole tensor or missing on a rank."""
    whole = {name: (0, grad.numel()) for name, grad in grads.items()}
    return [] if all(dict(shard) == whole for shard in shards) else shards


def _assemble(ranks: Sequence[Sequence[Part]]) -> dict[str, Tensor]:
    """Whole tensors, each element from the first rank that has it; NaN where none has."""
    whole: dict[str, Tensor] = {}
    known: dict[str, Tensor] = {}
    for parts in ranks:
        for part in parts:
            if part.name not in whole:
                size = torch.Size(part.shape).numel()
                whole[part.name] = torch.full((size,), float("nan"), dtype=part.value.dtype)
                known[part.name] = torch.zeros(size, dtype=torch.bool)
            new = ~known[part.name][part.index]
            whole[part.name][part.index] = torch.where(
                new, part.value, whole[part.name][part.index]
            )
            known[part.name][part.index] = True
    shapes = {part.name: part.shape for parts in ranks for part in parts}
    return {name: value.view(shapes[name]) for name, value in whole.items()}


def _views(ranks: Sequence[Sequence[Part]], agreed: Tensors) -> dict[int, dict[str, Tensor]]:
    """For the names on which ranks do not agree, what every rank that holds something of it sees;
    nothing where all agree.
    """
    odd = {
        part.name
        for parts in ranks
        for part in parts
        if not torch.equal(part.value, agreed[part.name].reshape(-1)[part.index])
    }
    found: dict[int, dict[str, Tensor]] = {}
    for rank, parts in enumerate(ranks):
        for part in parts:
            if part.name in odd:
                own = found.setdefault(rank, {}).setdefault(part.name, agreed[part.name].clone())
                own.view(-1)[part.index] = part.value
    return found
