"""Loaders of a loop, whose batches are whole: each rank of the data axis keeps its part.

A batch is made whole on every rank. So its samples, their order and their padding are those of one
device, in the last batch too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from plait.batch_trees import cut_samples
from plait.datasets.loader import bounds
from plait.values import JsonObject, PyTree


class PartOfBatch:
    """A collate function that keeps one rank's samples of what another makes."""

    def __init__(self, collate: Callable[[PyTree], PyTree], rank: int, size: int) -> None:
        self._collate = collate
        self._rank = rank
        self._shares = (1,) * size

    def __call__(self, samples: Sequence[PyTree]) -> PyTree:
        """This rank's part of a batch; its tensors may be empty."""
        return cut_samples(self._collate(samples), self._part, self._place)

    def _part(self, tensor: Tensor) -> Tensor:
        return tensor[self._place(tensor.shape[0])]

    def _place(self, num_samples: int) -> slice:
        return slice(*bounds(num_samples, self._shares, self._rank))


class JoinedBatches:
    """A batch sampler that joins each few batches of another to one."""

    def __init__(self, batches: BatchSampler, count: int) -> None:
        self._batches = batches
        self._count = count
        self.batch_size = getattr(batches, "batch_size", 1) * count
        self.drop_last = getattr(batches, "drop_last", False)

    @property
    def sampler(self) -> object:
        """The sampler of single samples."""
        return getattr(self._batches, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Sampler[int]) -> None:
        self._batches.sampler = sampler

    def __len__(self) -> int:
        number: int = len(self._batches)
        return number // self._count if self.drop_last else -(-number // self._count)

    def __iter__(self) -> Iterator[list[int]]:
        source = iter(self._batches)
        while taken := list(islice(source, self._count)):
            if len(taken) == self._count or not self.drop_last:
                yield [index for batch in taken for index in batch]

    def set_epoch(self, epoch: int) -> None:
        """Tell the other sampler the epoch, where it asks for one."""
        for told in (self._batches, self.sampler):
            if hasattr(told, "set_epoch"):
                told.set_epoch(epoch)


def seeded(loader: DataLoader[PyTree], broadcast: Callable[[int], int]) -> DataLoader[PyTree]:
    """A loader that shuffles alike on all ranks. Collective where it shuffles."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        sampler.generator = torch.Generator().manual_seed(broadcast(seed))
    return loader


def shared(
    loader: DataLoader[PyTree], rank: int, size: int, *, joined: int = 1
) -> DataLoader[PyTree]:
    """A loader of rank's part of batches that are `joined` times as large."""
    settings: JsonObject = {
        "num_workers": loader.num_workers,
        "collate_fn": PartOfBatch(loader.collate_fn, rank, size),
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    make = partial(DataLoader, loader.dataset, **settings)
    if isinstance(loader.dataset, IterableDataset):
        size_of_batch = (loader.batch_size or 1) * joined
        return make(batch_size=size_of_batch, drop_last=loader.drop_last)
    batches = loader.batch_sampler
    if joined > 1 and batches is not None:
        return make(batch_sampler=JoinedBatches(batches, joined))  # type: ignore[arg-type]
    return make(batch_sampler=batches)
