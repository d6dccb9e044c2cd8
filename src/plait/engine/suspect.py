"""The origin of a step that is no number: where on which rank it began.

Weights are looked at, then the batch, a replay of the forward, losses, and gradients. The first
that is no number names module, micro-batch and sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.comm import World
from plait.engine.stages.pipeline import Pipeline
from plait.engine.stages.whole_model import OfAnotherStage
from plait.parallel.data import DataStrategy
from plait.values import PyTree

SAMPLES_NAMED: Final = 4
SPIKE_FACTOR: Final = 20.0
"""Times the median norm from which a gradient stands out."""


@dataclass(frozen=True)
class Origin:
    """Where one rank has seen what is no number; a smaller `order` is nearer to the cause.

    `size` is the loss or the gradient that stands out, where all are numbers.
    """

    order: int
    where: str
    cause: str
    size: float = 0.0
    micro_batch: int | None = None
    module: str | None = None
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepSizes:
    """The mean losses of a rank's micro-batches, and the gradient norms of its stages."""

    losses: Sequence[float]
    norms: Mapping[int, float]


@dataclass(frozen=True)
class Suspect:
    """The parts of a rank in which an origin is looked for."""

    world: World
    model: nn.Module
    pipeline: Pipeline
    strategy: DataStrategy
    together: bool = True
    """Whether the ranks update together, so that they can decide together."""

    def sizes(self) -> StepSizes:
        """The losses and norms of the step under way."""
        losses = [float(loss) for loss in self.pipeline.loss.means()]
        norms = {
            stage: float(part.strategy.squared_norm(None)) ** 0.5
            for stage, part in self.pipeline.parts.items()
        }
        return StepSizes(losses, norms)


def origin_of(suspect: Suspect) -> tuple[int, Origin]:
    """The rank and the place where something that is no number came from. Collective."""
    found = _bad_weight(suspect) or Origin(9, "", "")
    replayed = _replayed(suspect)
    for other in (_bad_input(suspect), replayed, _bad_loss(suspect), _bad_gradient(suspect)):
        if other is not None and other.order < found.order:
            found = other
    told: list[Origin] = suspect.world.axis("world").gather_objects(found)
    rank = min(range(len(told)), key=lambda one: (told[one].order, one))
    if told[rank].order == 9:
        return 0, Origin(9, "the step", "nothing that this version looks at shows where it began")
    return rank, told[rank]


def loudest(world: World, own: StepSizes, size: float, middle: float) -> tuple[int, Origin]:
    """The rank and the micro-batch whose loss stands out most, else the rank whose gradient does.
    Collective.

    Backward carries a large gradient on to earlier stages, where it may be larger still. So of
    the stages whose gradient stands out the last one is named.
    """
    of_ranks = world.axis("world").gather_objects((own.losses, own.norms))
    cause = f"the gradient norm is {size:.4g}, {size / middle:.1f} times the median"
    ranked = [(max(each), rank) for rank, (each, _) in enumerate(of_ranks) if each]
    spread = max(ranked)[0] > 1.2 * min(ranked)[0] if ranked else False
    if spread:
        largest, rank = max(ranked)
        index = of_ranks[rank][0].index(largest)
        where = f"micro-batch {index}, whose loss is {largest:.4g}"
        return rank, Origin(0, where, cause, largest, index)
    norms = [
        (stage if norm > SPIKE_FACTOR * middle else -1, norm, -rank)
        for rank, (_, of_stages) in enumerate(of_ranks)
        for stage, norm in of_stages.items()
    ]
    _, largest, rank = max(norms)
    return -rank, Origin(0, "the gradient of this rank's parameters", cause, largest)


def _bad_weight(suspect: Suspect) -> Origin | None:
    """The first parameter that has an element that is no number.

    What this rank keeps for all comes first: the others see a bad element too, once they have
    gathered it.
    """
    strategy = suspect.strategy
    kept = [
        *((piece.name, piece.value) for piece in strategy.pieces),
        *((shard.name, shard.values) for shard in strategy.frozen_shards(trained=True)),
    ]
    for order, held in enumerate((kept, suspect.model.named_parameters())):
        for name, param in held:
            if isinstance(param, OfAnotherStage):
                continue
            if param.untyped_storage().nbytes() and not is_finite(param.detach()):
                module = name.rpartition(".")[0]
                count = int((~torch.isfinite(param.detach())).sum())
                cause = f"weight: {count} elements of {name} are no finite numbers"
                where = f"module {module or 'the model'}, {name}"
                return Origin(order, where, cause, module=module)
    return None


def _bad_input(suspect: Suspect) -> Origin | None:
    """The first micro-batch that was no number when it came."""
    for index, inputs, num_samples in suspect.pipeline.batches():
        if all(is_finite(one) for one in _numbers(inputs)):
            continue
        samples = _bad_samples(inputs, num_samples)
        which = _which(samples)
        cause = "data: the batch itself has an element that is no finite number"
        return Origin(2, f"the batch, micro-batch {index}{which}", cause, 0.0, index, "", samples)
    return None


def _which(samples: tuple[int, ...]) -> str:
    return f", sample {', '.join(map(str, samples))}" if samples else ""


def _replayed(suspect: Suspect) -> Origin | None:
    """The first module whose output is no number when the step's forward is done again.

    Collective: stages send each other what they sent.
    """
    seen: list[Origin] = []
    pipeline = suspect.pipeline
    with _watched(suspect.model, pipeline, seen), torch.no_grad():
        loss = pipeline.replay()
    if seen:
        return seen[0]
    bad = [index for index, one in enumerate(loss.means()) if not math.isfinite(float(one))]
    if bad:
        cause = "loss function: the output is finite, and its loss is not"
        return Origin(4, f"the loss of micro-batch {bad[0]}", cause, micro_batch=bad[0])
    return None


@contextmanager
def _watched(model: nn.Module, pipeline: Pipeline, seen: list[Origin]) -> Iterator[None]:
    """Have the first module noted that makes something that is no number of finite inputs."""

    def look(name: str, args: PyTree, output: PyTree) -> None:
        if seen or all(is_finite(one) for one in _numbers(output)):
            return
        if not all(is_finite(one) for one in _numbers(args)):
            return
        samples = _bad_samples(output, pipeline.samples_under_way)
        index = pipeline.under_way
        where = f"module {name or 'the model'}, micro-batch {index}{_which(samples)}"
        cause = "activation: finite inputs give an output that is no finite number"
        seen.append(Origin(3, where, cause, 0.0, index, name, samples))

    handles = [
        module.register_forward_hook(
            lambda module, args, output, name=name: look(name, args, output)
        )
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bad_samples(output: PyTree, num_samples: int) -> tuple[int, ...]:
    """The samples of a micro-batch whose output is no number; empty where it is all of them."""
    for one in _numbers(output):
        if one.dim() > 1 and one.shape[0] == num_samples:
            flat = torch.isfinite(one).flatten(1).all(1)
            bad = (~flat).nonzero().flatten().tolist()
            return tuple(bad[:SAMPLES_NAMED]) if len(bad) < num_samples else ()
    return ()


def _bad_loss(suspect: Suspect) -> Origin | None:
    """The first micro-batch of this rank whose loss was no number, and is one in a replay."""
    for index, loss in enumerate(suspect.pipeline.loss.means()):
        if not math.isfinite(float(loss)):
            cause = "passing: a replay of the step is finite, so a value changed for a moment"
            return Origin(5, f"micro-batch {index}", cause, micro_batch=index)
    return None


def _bad_gradient(suspect: Suspect) -> Origin | None:
    """The last parameter whose gradient is no number: backward comes to it first."""
    bad = [
        piece.name
        for piece in suspect.strategy.pieces
        if piece.value.grad is not None and not is_finite(piece.value.grad)
    ]
    if not bad:
        return None
    module = bad[-1].rpartition(".")[0]
    cause = "gradient: the loss is finite, and its gradient is not"
    return Origin(6, f"module {module or 'the model'}, {bad[-1]}", cause, module=module)


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements of a tensor [...] are numbers."""
    return bool(torch.isfinite(tensor).all())


def _numbers(values: PyTree) -> list[Tensor]:
    return [
        one.detach()
        for one in tree_leaves(values)
        if isinstance(one, Tensor) and one.is_floating_point() and one.numel()
    ]
