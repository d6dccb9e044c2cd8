"""Parameters that several stages share: each has a copy, and the gradients of all copies are summed
before the update.

A tied parameter has a bucket of its own on each of its stages. So a shard is the same elements
everywhere. All copies start alike, see the same gradient, and so stay alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plait.comm import Axis
from plait.parallel.data import DataStrategy, OptimizerShard


def tied_sums(
    axis: Axis,
    placement: Sequence[int],
    stages_of: Mapping[str, Sequence[int]],
    strategies: Mapping[int, DataStrategy],
) -> list[Callable[[], None]]:
    """The sum of tied gradients, as a step of a reduction; empty for a rank that has none."""
    tied = TiedSum(axis, placement, stages_of, strategies)
    return [tied.sum] if tied.names else []


class TiedSum:
    """Sums the gradients of this rank's copies with those of other stages. `stages_of` names every
    tied parameter.
    """

    def __init__(
        self,
        axis: Axis,
        placement: Sequence[int],
        stages_of: Mapping[str, Sequence[int]],
        strategies: Mapping[int, DataStrategy],
    ) -> None:
        self._axis = axis
        self._ranks: dict[str, list[int]] = {}
        self._own: dict[str, list[OptimizerShard]] = {}
        for name, stages in stages_of.items():
            ranks = list(dict.fromkeys(placement[stage] for stage in stages))
            if axis.rank in ranks:
                self._ranks[name] = ranks
                here = [strategies[stage] for stage in stages if placement[stage] == axis.rank]
                self._own[name] = [
                    piece for strategy in here for piece in strategy.pieces if piece.name == name
                ]

    @property
    def names(self) -> list[str]:
        """The tied parameters of this rank, in the order of their sums."""
        return sorted(self._own)

    def sum(self) -> None:
        """Let every copy's gradient be the sum of all. Collective along the pipeline."""
        for name in self.names:
            pieces = self._own[name]
            for piece in pieces:
                piece.state.touched.add(piece.state.bucket.slots.index(piece.part.slot))
            grads = [piece.value.grad for piece in pieces if piece.value.grad is not None]
            if grads:
                self._sum(grads, self._ranks[name])

    def _sum(self, grads: list[Tensor], ranks: list[int]) -> None:
        """The first rank adds up in the order of stages, and tells the others."""
        axis = self._axis
        total = grads[0]
        for other in grads[1:]:
            total.add_(other)
        if axis.rank != ranks[0]:
            sent = axis.send(total, ranks[0])
            axis.receive(total, ranks[0]).wait()
            sent.wait()
        else:
            for rank in ranks[1:]:
                arrived = torch.empty_like(total)
                axis.receive(arrived, rank).wait()
                total.add_(arrived)
            for work in [axis.send(total, rank) for rank in ranks[1:]]:
                work.wait()
        for other in grads[1:]:
            other.copy_(total)
