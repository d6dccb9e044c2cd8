"""Masks for probes: padding that differs between samples, as real data has it and means of means
get wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from plait.datasets.collate import collate
from plait.datasets.hashing import uniforms
from plait.datasets.sample_set import SampleSet
from plait.errors import DataError

IGNORE = -100


class Masked(Dataset[tuple[Tensor, Tensor]]):
    """`dataset` with targets set to -100: of a sequence all after a random length, of a single
    class all of it.

    Lengths are uniform in 1 .. S, a class is masked with probability 1/2; sample 0 is never wholly
    masked. What is masked is a function of (seed, index) alone.
    """

    def __init__(self, dataset: SampleSet, *, seed: int = 0) -> None:
        self.dataset = dataset
        self.seed = seed
        self.keyed_order = getattr(dataset, "keyed_order", False)
        self.draws = getattr(dataset, "draws", False)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        first: tuple[Tensor, Tensor] = tree_map(lambda x: x[0], (inputs, targets))
        return first

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [B] -> (inputs [B, ...], targets [B, ...] with masks).

        Raises:
            DataError: targets that are no whole numbers.
        """
        inputs, targets = collate(self.dataset, indices)
        if targets.is_floating_point():
            raise DataError(
                f"targets of {targets.dtype} cannot be masked: the label -100, which does not "
                "count, needs whole numbers"
            )
        shares = uniforms(indices, 1, seed=self.seed)[:, 0]
        if targets.dim() == 1:
            return inputs, targets.masked_fill((shares > 0.5) & (indices > 0), IGNORE)
        lengths = (shares * targets.shape[1]).ceil()
        after = torch.arange(targets.shape[1]) >= lengths[:, None]
        return inputs, targets.masked_fill(
            after.view(*after.shape, *[1] * (targets.dim() - 2)), IGNORE
        )
