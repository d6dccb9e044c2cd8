"""Cut a list of layers into stages: balanced by cost within memory, at named layers, or by counts.

The slowest stage sets the pace of a pipeline, so its time is minimised first. Of the best cuts the
most even is taken. This is dynamic programming over all cuts (Narayanan et al., PipeDream, arXiv
1806.03377, section 3.1, without replication). Every layer is in exactly one stage: 30 layers on 4
stages are 30 layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from plait.errors import ModelError


@dataclass(frozen=True)
class LayerProfile:
    """The profile of one layer, for the partitioner; embeddings and heads are layers too.

    `seconds`: forward and backward of one micro-batch (or any unit of cost). `state_bytes`:
    weights, gradients, optimizer. `activation_bytes`: of one live micro-batch. `output_bytes`: sent
    on if the next stage starts behind it.
    """

    name: str
    seconds: float
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    output_bytes: float = 0.0


@dataclass(frozen=True)
class StageLimits:
    """The limits of a stage: `memory_bytes`, with `live` micro-batches of activations.

    The schedule gives `live` for each stage.

    With `bytes_per_second` a link that is slower than every stage sets the pace too. An output and
    its gradient pass it for each micro-batch.
    """

    memory_bytes: float = math.inf
    live: tuple[float, ...] = ()
    bytes_per_second: float = math.inf


@dataclass(frozen=True)
class Partition:
    """Stage s holds layers `bounds[s]` to `bounds[s + 1]` (exclusive)."""

    layers: tuple[LayerProfile, ...]
    bounds: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    @property
    def seconds(self) -> tuple[float, ...]:
        """Cost of each stage."""
        seconds = [layer.seconds for layer in self.layers]
        return tuple(sum(seconds[start:stop]) for start, stop in pairwise(self.bounds))

    @property
    def shares(self) -> tuple[float, ...]:
        """Each stage's part of the whole cost; equal shares are the best."""
        total = sum(self.seconds)
        return tuple(
            seconds / total if total else 1 / len(self.seconds) for seconds in self.seconds
        )

    def stage_of(self, layer: int) -> int:
        """The stage that holds a layer."""
        return next(stage for stage, stop in enumerate(self.bounds[1:]) if layer < stop)

    def __str__(self) -> str:
        lines = []
        for stage, (start, stop) in enumerate(pairwise(self.bounds)):
            names = f"{self.layers[start].name} .. {self.layers[stop - 1].name}"
            lines.append(
                f"stage {stage}: {stop - start:>3} layers {self.shares[stage]:6.1%}  {names}"
            )
        return "\n".join(lines)


def balanced(
    layers: Sequence[LayerProfile], num_stages: int, limits: StageLimits | None = None
) -> Partition:
    """The cut whose slowest stage (or link) is fastest, within the limits; the most even one of
    these.

    Raises ModelError: fewer layers than stages, or no cut fits into the memory (it says what the
    best would need).
    """
    limits = limits or StageLimits()
    _check(layers, num_stages)
    pace = _pace(layers, limits)
    room = _room(layers, num_stages, limits)
    fitting = _best(
        len(layers),
        num_stages,
        lambda s, i, j: pace(i, j) if room(s, i, j) <= limits.memory_bytes else math.inf,
        max,
    )
    if fitting is None:
        least = _best(len(layers), num_stages, room, max)
        need = least[0] if least else math.inf
        raise ModelError(
            f"no cut into {num_stages} stages fits {limits.memory_bytes / 2**30:.2f} GiB a "
            "stage: the best needs "
            f"{need / 2**30:.2f} GiB; take more stages, a schedule with fewer live "
            "micro-batches, recomputation or ZeRO"
        )
    slowest = fitting[0] * (1 + 1e-12)

    def unevenness(stage: int, start: int, stop: int) -> float:
        seconds = pace(start, stop)
        return (
            seconds**2
            if seconds <= slowest and room(stage, start, stop) <= limits.memory_bytes
            else math.inf
        )

    even = _best(len(layers), num_stages, unevenness, lambda before, stage: before + stage)
    return Partition(tuple(layers), (even or fitting)[1])


def by_counts(
    layers: Sequence[LayerProfile], counts: Sequence[int], blocks: Collection[str] = ()
) -> Partition:
    """Stages of so many layers each, as (2, 3, 2), or of so many `blocks`, by name.

    Counts that sum to all layers count layers. Counts that sum to the number of blocks count
    blocks. Links before the first block are the first stage's, and links behind a block its
    stage's.

    Raises:
        ModelError: counts below 1, or that sum to neither number.
    """
    _check(layers, len(counts))
    places = [place for place, layer in enumerate(layers) if layer.name in blocks]
    total = sum(counts)
    if min(counts) < 1 or total not in (len(layers), len(places)):
        raise ModelError(
            f"the counts {tuple(counts)} sum to {total}; {_sums(layers, len(places))}, at least "
            "1 a stage"
        )
    stops = list(accumulate(counts))
    if total != len(layers):
        stops = [*(places[stop] for stop in stops[:-1]), len(layers)]
    return Partition(tuple(layers), (0, *stops))


def _sums(layers: Sequence[LayerProfile], num_blocks: int) -> str:
    """The sums that counts may have, in words."""
    if num_blocks in (0, len(layers)):
        return f"the model has {len(layers)} layers"
    return (
        f"the model has {num_blocks} blocks, and {len(layers)} layers with embedding, norm and "
        "head: "
        f"give counts that sum to {num_blocks} or to {len(layers)}"
    )


def by_names(layers: Sequence[LayerProfile], firsts: Sequence[str]) -> Partition:
    """A new stage starts at each of the named layers; the first stage starts at the first layer.

    Raises:
        ModelError: an unknown layer, or layers that are not in order.
    """
    positions = {layer.name: index for index, layer in enumerate(layers)}
    unknown = [name for name in firsts if name not in positions]
    if unknown:
        raise ModelError(f"no layer is called '{unknown[0]}'; layers: {', '.join(positions)}")
    bounds = (0, *(positions[name] for name in firsts), len(layers))
    if any(start >= stop for start, stop in pairwise(bounds)):
        raise ModelError(
            "the stages must start at later and later layers, after the first; got "
            f"{', '.join(firsts)}"
        )
    return Partition(tuple(layers), bounds)


def check_depth(num_layers: int, num_stages: int, per_rank: int = 1) -> None:
    """Raise ModelError unless every stage can have a layer; `per_rank` stages are on each rank."""
    if num_stages < 1:
        raise ModelError(f"{num_stages} stages; at least 1 is needed")
    if num_stages <= num_layers:
        return
    most = num_layers // per_rank
    each = f" ({per_rank} on each of {num_stages // per_rank} ranks)" if per_rank > 1 else ""
    cure = f"say pp{most} or fewer" if most > 1 else "leave pp out"
    if num_layers == 0:
        raise ModelError(
            f"{num_stages} stages are cut between the modules that a forward calls, and this one "
            f"calls none that has parameters; {cure}, or put modules of plain lists into "
            "an nn.ModuleList"
        )
    if most < 2 and per_rank > 1:
        cure = "take a schedule with one stage a rank (1f1b), or a deeper model"
    raise ModelError(
        f"{num_stages} stages{each} need as many layers, the model has {num_layers}; {cure} "
        "(a layer is a module that the model's forward calls: the embedding, a block, the head)"
    )


def _check(layers: Sequence[LayerProfile], num_stages: int) -> None:
    check_depth(len(layers), num_stages)


def _pace(layers: Sequence[LayerProfile], limits: StageLimits) -> Callable[[int, int], float]:
    """Seconds of layers start to stop, or of the link behind them where that is slower."""
    before = [0.0, *accumulate(layer.seconds for layer in layers)]

    def pace(start: int, stop: int) -> float:
        link = (
            2 * layers[stop - 1].output_bytes / limits.bytes_per_second
            if stop < len(layers)
            else 0.0
        )
        return max(before[stop] - before[start], link)

    return pace


def _room(
    layers: Sequence[LayerProfile], num_stages: int, limits: StageLimits
) -> Callable[[int, int, int], float]:
    """Bytes of layers start to stop as a stage."""
    if limits.live and len(limits.live) != num_stages:
        raise ModelError(
            f"live activations are given for {len(limits.live)} stages, there are {num_stages}"
        )
    state = [0.0, *accumulate(layer.state_bytes for layer in layers)]
    activations = [0.0, *accumulate(layer.activation_bytes for layer in layers)]

    def room(stage: int, start: int, stop: int) -> float:
        live = limits.live[stage] if limits.live else 1.0
        return state[stop] - state[start] + live * (activations[stop] - activations[start])

    return room


def _best(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]] | None:
    """The cut with the least combined `cost(stage, start, stop)`, and its bounds; None where all
    cost infinity.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        0: (0.0, (0,))
    }  # layers placed -> cost, bounds
    for stage in range(num_stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (value, bounds) in best.items():
            last = num_layers - (num_stages - stage - 1)
            for stop in [num_layers] if stage + 1 == num_stages else range(start + 1, last + 1):
                total = combine(value, cost(stage, start, stop)) if start < stop else math.inf
                if total < following.get(stop, (math.inf,))[0]:
                    following[stop] = (total, (*bounds, stop))
        best = following
    return best.get(num_layers)
