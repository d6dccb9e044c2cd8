"""Orders of samples: which samples stand at which places of an endless stream.

Every order is a function of (seed, epoch, place) alone. No rank, worker or plan is in it.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from plait.datasets.hashing import seed_of
from plait.datasets.permutation import KeyedPermutation
from plait.datasets.sample_set import SampleSet

ENDLESS: Final = 1 << 62


class Order(Protocol):
    """An order of samples, epoch after epoch.

    Attributes:
        num_samples: the samples of an epoch.
    """

    num_samples: int

    def at(self, epoch: int, start: int, stop: int) -> Tensor:
        """The samples at the places start .. stop - 1 of an epoch."""


class Shuffled:
    """A shuffled list, made once an epoch: the order of sets that fit into memory."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._made: tuple[int, Tensor] | None = None

    def at(self, epoch: int, start: int, stop: int) -> Tensor:
        """A part of the list."""
        made = self._made
        if made is None or made[0] != epoch:
            generator = torch.Generator().manual_seed(seed_of(self._seed, epoch))
            made = epoch, torch.randperm(self.num_samples, generator=generator)
            self._made = made  # threads may ask for different epochs
        return made[1][start:stop]


class Keyed:
    """A keyed permutation: any place of any epoch in a few operations, whatever the size."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._made: tuple[int, KeyedPermutation] | None = None

    def at(self, epoch: int, start: int, stop: int) -> Tensor:
        """The permutation of a range."""
        made = self._made
        if made is None or made[0] != epoch:
            made = epoch, KeyedPermutation(self.num_samples, seed_of(self._seed, epoch))
            self._made = made
        return made[1](torch.arange(start, min(stop, self.num_samples)))


class AsDrawn:
    """The order of a set that draws its samples itself, in one epoch without end."""

    num_samples = ENDLESS

    def at(self, epoch: int, start: int, stop: int) -> Tensor:
        """The places themselves."""
        return torch.arange(start, stop)


def order_of(dataset: SampleSet, seed: int) -> Order:
    """The order in which a data set is read: by the set's own word, else a shuffled list.

    A set with `keyed_order = True` is read by a keyed permutation, one with `draws = True` as it
    draws.
    """
    if getattr(dataset, "draws", False):
        return AsDrawn()
    if getattr(dataset, "keyed_order", False):
        return Keyed(len(dataset), seed)
    return Shuffled(len(dataset), seed)
