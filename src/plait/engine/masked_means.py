"""A warning where a loss may be a mean over targets, and the plan weighs it by samples.

A loss that is one number means "the mean over the samples". The mean of `cross_entropy` is over the
targets that are not masked. The two differ as soon as samples have different numbers of these.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.engine.loss import LossFunction
from plait.models.losses import IGNORE
from plait.torch_internals import is_recorded
from plait.values import PyTree

LOOKS = 4
"""Micro-batches of which the targets are read; each reading waits for the device."""


class MaskedMeanCheck:
    """A loss function that looks at its first targets, and warns once.

    Attributes:
        parts: the slices of a batch that have a loss each, over all ranks.
    """

    def __init__(self, function: LossFunction, parts: int) -> None:
        self.parts = parts
        self._function = function
        self._looks = LOOKS
        self._is_masked = False
        self._counts: dict[int, set[int]] = {}

    def __call__(self, output: PyTree, targets: PyTree) -> Tensor | tuple[Tensor, Tensor]:
        loss = self._function(output, targets)
        if self._looks and isinstance(loss, Tensor) and not is_recorded():
            self._looks -= 1
            self._look(targets)
        return loss

    def _look(self, targets: PyTree) -> None:
        masked = any(
            isinstance(leaf, Tensor) and bool((leaf == IGNORE).any())
            for leaf in tree_leaves(targets)
        )
        self._is_masked = self._is_masked or masked
        for place, counts in targets_of_samples(targets):
            known = self._counts.setdefault(place, set())
            known.update(counts.tolist())
            if self._is_masked and len(known) > 1:
                self._looks = 0
                self._warn(min(known), max(known))
                return

    def _warn(self, fewest: int, most: int) -> None:
        warnings.warn(
            "the loss returns one number, which counts as the mean over samples, and samples have "
            f"{fewest} to {most} targets that are not {IGNORE}; a mean over targets is then "
            f"weighed wrongly over the {self.parts} parts of a batch: return (sum, count) instead, "
            f"such as cross_entropy(..., reduction='sum') and (targets != {IGNORE}).sum()",
            stacklevel=2,
        )


def targets_of_samples(targets: PyTree) -> Iterator[tuple[int, Tensor]]:
    """Which leaves are classes, each with the number of unmasked ones of every sample [B]."""
    for place, leaf in enumerate(tree_leaves(targets)):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.dtype == torch.int64 and len(leaf):
            yield place, (leaf != IGNORE).reshape(len(leaf), -1).sum(1)
