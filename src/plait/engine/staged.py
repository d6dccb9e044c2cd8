"""The data strategies of a rank's stages as one: each stage has its own buckets, the optimizer sees
all pieces.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plait.data import DataStrategy, FrozenPiece, Piece, Replicas
from plait.data.gradients import BucketState, Sink
from plait.data.strategy import Weight


class Staged(DataStrategy):
    """Several strategies over one data axis. The moments of a micro-batch are told to the stage's
    own strategy.
    """

    def __init__(self, by_stage: Mapping[int, DataStrategy]) -> None:
        self.by_stage = dict(by_stage)
        parts = list(self.by_stage.values())
        super().__init__(parts[0].group)
        self._parts = parts
        self.states = [state for part in parts for state in part.states]
        self.frozen_states = [state for part in parts for state in part.frozen_states]
        self.pieces = [piece for part in parts for piece in part.pieces]
        self._part_of = {
            id(state): part for part in parts for state in (*part.states, *part.frozen_states)
        }

    def write(self, state: BucketState, index: int, value: Tensor) -> None:
        self._part_of[id(state)].write(state, index, value)

    def begin(self) -> None:
        for part in self._parts:
            part.begin()

    def reduce(self) -> None:
        for part in self._parts:
            part.reduce()

    def publish(self) -> None:
        for part in self._parts:
            part.publish()

    def squared_norm(self, weight: Weight | None = None) -> Tensor:
        return torch.stack([part.squared_norm(weight) for part in self._parts]).sum()

    def is_secondary(self, piece: Piece) -> bool:
        return self._part_of[id(piece.state)].is_secondary(piece)

    def replicas_of(self, piece: Piece) -> Replicas:
        return self._part_of[id(piece.state)].replicas_of(piece)

    @property
    def replicas(self) -> Replicas:
        return self._parts[0].replicas

    def sinks(self) -> dict[int, Sink]:
        return {key: sink for part in self._parts for key, sink in part.sinks().items()}

    def frozen_pieces(self) -> list[FrozenPiece]:
        return [piece for part in self._parts for piece in part.frozen_pieces()]

    def live_tensors(self) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for part in self._parts:
            for kind, tensors in part.live_tensors().items():
                found.setdefault(kind, []).extend(tensors)
        return found
