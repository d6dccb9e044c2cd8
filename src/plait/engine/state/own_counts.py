"""Counts that an optimizer keeps in attributes of its own, as `self.total_step += 1`.

Checkpoints hold none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.engine.whole_tensors import WholeOptimizer


class OwnCounts:
    """The whole numbers of an optimizer of this rank, as they are before its first step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        while isinstance(optimizer, WholeOptimizer):
            optimizer = optimizer.inner
        self._optimizer = optimizer
        self._first = self._now()

    def changed(self) -> str | None:
        """The name of an attribute whose count steps have changed, if any."""
        now = self._now()
        return next((name for name, first in self._first.items() if now.get(name) != first), None)

    def _now(self) -> dict[str, int]:
        """The attributes that are whole numbers, or tensors with one."""
        counts = {}
        for name, value in vars(self._optimizer).items():
            if isinstance(value, int) and not isinstance(value, bool):
                counts[name] = value
            elif isinstance(value, Tensor) and value.numel() == 1 and _counts(value):
                counts[name] = int(value)
        return counts


def _counts(value: Tensor) -> bool:
    is_whole = not value.is_floating_point() and value.dtype is not torch.bool
    return is_whole and not value.is_meta
