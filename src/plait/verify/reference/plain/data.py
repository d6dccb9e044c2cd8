"""The global batches that training should see, cut from the data set without its loader."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from plait.datasets.collate import collate
from plait.datasets.hashing import seed_of
from plait.datasets.order import Shuffled, order_of
from plait.datasets.sample_set import SampleSet
from plait.verify.reference.batches import Batch


def plain_batches(dataset: SampleSet, global_batch: int, seed: int) -> Iterator[Batch]:
    """Whole global batches, epoch after epoch, without an end.

    Each epoch is a permutation of its own, from its first sample to its last.
    """
    for indices in _indices(dataset, global_batch, seed):
        yield collate(dataset, indices)


def _indices(dataset: SampleSet, global_batch: int, seed: int) -> Iterator[Tensor]:
    own = order_of(dataset, seed)
    if not isinstance(own, Shuffled):  # drawn or keyed: an order that only the set can tell
        yield from _as_told(dataset, global_batch, seed)
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed_of(seed, epoch))
        yield from torch.randperm(len(dataset), generator=generator).split(global_batch)
        epoch += 1


def _as_told(dataset: SampleSet, global_batch: int, seed: int) -> Iterator[Tensor]:
    order = order_of(dataset, seed)
    epoch = 0
    while True:
        for start in range(0, order.num_samples, global_batch):
            yield order.at(epoch, start, min(start + global_batch, order.num_samples))
        epoch += 1
