"""Several data strategies seen as one: the stages of a rank, or experts beside dense parameters.

Every moment is passed on to every part. A test holds that no moment is missing here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.mesh import Shard
from plait.parallel.data.gradients import BucketState, MainGrad
from plait.parallel.data.strategy import DataStrategy, Replicas, Weight


class Composite(DataStrategy):
    """The buckets and pieces of all parts, in their order."""

    def __init__(self, parts: Sequence[DataStrategy]) -> None:
        super().__init__(parts[0].group)
        self._parts = tuple(parts)
        self.states = [state for part in parts for state in part.states]
        self.frozen_states = [state for part in parts for state in part.frozen_states]
        self.pieces = [piece for part in parts for piece in part.pieces]
        self.gather_orders = [order for part in parts for order in part.gather_orders]

    def begin_step(self) -> None:
        for part in self._parts:
            part.begin_step()

    def before_forward(self) -> None:
        for part in self._parts:
            part.before_forward()

    def after_forward(self) -> None:
        for part in self._parts:
            part.after_forward()

    def before_last_backward(self, weight: float | None = None) -> None:
        for part in self._parts:
            part.before_last_backward(weight)

    def after_backward(self, *, weight_grads: bool = True) -> None:
        for part in self._parts:
            part.after_backward(weight_grads=weight_grads)

    def reduce(self) -> None:
        for part in self._parts:
            part.reduce()

    def publish(self) -> None:
        for part in self._parts:
            part.publish()

    def load(self, state: BucketState, index: int, value: Tensor) -> None:
        for part in self._parts:
            if any(state is known for known in (*part.states, *part.frozen_states)):
                part.load(state, index, value)

    @property
    def replicas(self) -> Replicas:
        """The replicas of the first part; each piece knows its own."""
        return self._parts[0].replicas

    def squared_norm(self, weight: Weight | None = None) -> Tensor:
        return torch.stack([part.squared_norm(weight) for part in self._parts]).sum()

    def main_grads(self) -> dict[int, MainGrad]:
        return {key: place for part in self._parts for key, place in part.main_grads().items()}

    def frozen_shards(self, *, trained: bool = False) -> list[Shard]:
        return [one for part in self._parts for one in part.frozen_shards(trained=trained)]

    def decoded_shards(self) -> list[Shard]:
        return [shard for part in self._parts for shard in part.decoded_shards()]

    def live_tensors(self) -> dict[str, list[Tensor]]:
        tensors: dict[str, list[Tensor]] = {}
        for part in self._parts:
            for kind, live in part.live_tensors().items():
                tensors.setdefault(kind, []).extend(live)
        return tensors
