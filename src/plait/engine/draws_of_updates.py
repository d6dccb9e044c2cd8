"""Random numbers of updates, as of an optimizer that adds noise to its gradients.

Data ranks have drawn other numbers in their forwards. Without a seed of the update their copies of
one parameter would get other noise, and would drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.engine.seeds import derive_seed
from plait.parallel.data import OptimizerShard
from plait.parallel.pipeline.payload import RandomState


class DrawsOfUpdates:
    """Seeds each update by the run's seed, the step, and what a rank updates first.

    So ranks that update the same elements draw the same numbers, and others draw their own.
    """

    def __init__(self, seed: int, device: torch.device, pieces: Sequence[OptimizerShard]) -> None:
        owned = min(((piece.name, piece.part.start) for piece in pieces), default=("", 0))
        self._words = (seed, "update", *owned)
        self._random = RandomState(device)
        self._step = -1
        self._updates = 0

    def begin(self, step: int) -> None:
        """An update of a step begins; an asynchronous pipeline makes several in one."""
        self._updates = self._updates + 1 if step == self._step else 0
        self._step = step
        self._random.seed(derive_seed(*self._words, step, self._updates))
