"""Stages with a number of devices each: PipeDream's own partition, for pipelines whose slow stages
are replicated.

Narayanan et al., PipeDream (arXiv 1806.03377), section 3.1. A stage on r devices takes its
micro-batches in turn and sums its gradients over them. The best partition of some layers is built
from better ones of fewer layers. It answers how a model would best be laid out; a plan of plait
replicates all stages alike (ppP dpN).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from plait.errors import ModelError
from plait.parallel.pipeline.partition import LayerProfile


@dataclass(frozen=True)
class ReplicatedPipeline:
    """Stage s holds layers `bounds[s]` to `bounds[s + 1]` on `replicas[s]` devices.

    `seconds` is the time from one micro-batch of a stage to its next, by stage, `link_seconds` that
    of the links around each.
    """

    bounds: tuple[int, ...]
    replicas: tuple[int, ...]
    seconds: tuple[float, ...]
    link_seconds: tuple[float, ...]

    @property
    def slowest_seconds(self) -> float:
        """The pace of the pipeline, which its slowest stage or link sets."""
        return max(*self.seconds, *self.link_seconds)

    def __str__(self) -> str:
        return "-".join(map(str, self.replicas))


@dataclass(frozen=True)
class _Model:
    """The costs of stages and links.

    Weights are `state_bytes`, four times of which pass a device in an all-reduce each way.
    """

    before: tuple[float, ...]
    weights: tuple[float, ...]
    layers: tuple[LayerProfile, ...]
    bytes_per_second: float

    @staticmethod
    def of(layers: Sequence[LayerProfile], bytes_per_second: float) -> _Model:
        before = (0.0, *accumulate(layer.seconds for layer in layers))
        weights = (0.0, *accumulate(layer.state_bytes for layer in layers))
        return _Model(before, weights, tuple(layers), bytes_per_second)

    def stage(self, start: int, stop: int, replicas: int) -> float:
        summed = (
            4
            * (replicas - 1)
            / replicas
            * (self.weights[stop] - self.weights[start])
            / self.bytes_per_second
        )
        return (self.before[stop] - self.before[start] + summed) / replicas

    def links(self, start: int, stop: int, replicas: int) -> float:
        """The slower of what comes into a stage of so many devices and what leaves it, with its
        gradient.
        """
        inner = (behind for behind in (start, stop) if start and behind < len(self.layers))
        return max(
            (
                2 * self.layers[b - 1].output_bytes / (self.bytes_per_second * replicas)
                for b in inner
            ),
            default=0.0,
        )


def replicated(
    layers: Sequence[LayerProfile], num_devices: int, bytes_per_second: float = math.inf
) -> ReplicatedPipeline:
    """The stages and replicas whose slowest stage or link is fastest; of equal ones that with
    fewer, larger stages first.

    `state_bytes` of a layer are its weights. Raises ModelError without layers or devices.
    """
    if not layers or num_devices < 1:
        raise ModelError(
            f"{len(layers)} layers on {num_devices} devices: at least one of each is needed"
        )
    model = _Model.of(layers, bytes_per_second)
    num = len(layers)
    best: dict[
        tuple[int, int], tuple[float, tuple[tuple[int, int], ...]]
    ] = {}  # (layers, devices) -> pace, (start, replicas)
    for stop in range(1, num + 1):
        for devices in range(1, num_devices + 1):
            fastest: tuple[float, tuple[tuple[int, int], ...]] = (
                model.stage(0, stop, devices),
                ((0, devices),),
            )
            for start in range(1, stop):
                for replicas in range(1, devices):
                    pace, stages = best[start, devices - replicas]
                    if pace >= fastest[0]:
                        continue
                    pace = max(
                        pace, model.stage(start, stop, replicas), model.links(start, stop, replicas)
                    )
                    if pace < fastest[0]:
                        fastest = (pace, (*stages, (start, replicas)))
            best[stop, devices] = fastest
    return laid_out(layers, best[num, num_devices][1], bytes_per_second)


def laid_out(
    layers: Sequence[LayerProfile],
    stages: Sequence[tuple[int, int]],
    bytes_per_second: float = math.inf,
) -> ReplicatedPipeline:
    """The costs of stages that begin at given layers with given replicas."""
    model = _Model.of(layers, bytes_per_second)
    bounds = (*(start for start, _ in stages), len(layers))
    replicas = tuple(count for _, count in stages)
    spans = [
        (start, stop, count)
        for (start, stop), count in zip(pairwise(bounds), replicas, strict=True)
    ]
    seconds = tuple(model.stage(*span) for span in spans)
    links = tuple(model.links(*span) for span in spans)
    return ReplicatedPipeline(bounds, replicas, seconds, links)
