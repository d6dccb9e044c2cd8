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
LISTED: Final = 1 << 22
"""Samples up to which a shuffled list is made: 32 MiB, in a tenth of a second."""
STRETCH: Final = 1024
"""Places that a keyed permutation computes together."""


class Order(Protocol):
    """An order of samples, epoch after epoch.

    Attributes:
        num_samples: the samples of an epoch.
    """

    num_samples: int

    def at(self, epoch: int, start: int, stop: int) -> Tensor:
        """The samples (int64, [stop - start]) at the places start .. stop - 1 of an epoch."""


class Shuffled:
    """A shuffled list, made once an epoch: the order of sets that fit into memory."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._made: tuple[int, Tensor] | None = None

    def at(self, epoch: int, start: int, stop: int) -> Tensor:
        """Samples (int64, [stop - start]) at these places of the shuffled list of an epoch."""
        made = self._made
        if made is None or made[0] != epoch:
            generator = torch.Generator().manual_seed(seed_of(self._seed, epoch))
            made = epoch, torch.randperm(self.num_samples, generator=generator)
            self._made = made  # threads may ask for different epochs
        return made[1][start:stop]


class Keyed:
    """A keyed permutation: any place of any epoch in a few operations, whatever the size.

    A permutation of a thousand places costs little more than that of one. So short ranges are cut
    from a stretch of `STRETCH` places, which is kept for those that follow.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._made: tuple[int, KeyedPermutation] | None = None
        self._stretch: tuple[int, int, Tensor] | None = None

    def at(self, epoch: int, start: int, stop: int) -> Tensor:
        """Samples (int64, [places]) at these places of an epoch's permutation, at most to
        its end.
        """
        stop = min(stop, self.num_samples)
        number = start // STRETCH
        if stop > (number + 1) * STRETCH:
            return self._permuted(epoch, start, stop)
        kept = self._stretch
        if kept is None or kept[:2] != (epoch, number):
            end = min((number + 1) * STRETCH, self.num_samples)
            kept = epoch, number, self._permuted(epoch, number * STRETCH, end)
            self._stretch = kept
        begin = start - number * STRETCH
        return kept[2][begin : begin + stop - start]

    def _permuted(self, epoch: int, start: int, stop: int) -> Tensor:
        """The permutation of a range, computed."""
        made = self._made
        if made is None or made[0] != epoch:
            made = epoch, KeyedPermutation(self.num_samples, seed_of(self._seed, epoch))
            self._made = made  # threads may ask for different epochs
        return made[1](torch.arange(start, stop))


class AsDrawn:
    """The order of a set that draws its samples itself, in one epoch without end."""

    num_samples = ENDLESS

    def at(self, epoch: int, start: int, stop: int) -> Tensor:
        """The places start .. stop - 1 themselves (int64, [stop - start]), in every epoch."""
        return torch.arange(start, stop)


def order_of(dataset: SampleSet, seed: int) -> Order:
    """The order in which a data set is read: by the set's own word, else by its size.

    A set with `draws = True` is read as it draws. One with `keyed_order = True`, or of more than
    `LISTED` samples, is read by a keyed permutation, any other by a shuffled list.
    """
    if getattr(dataset, "draws", False):
        return AsDrawn()
    if getattr(dataset, "keyed_order", False) or len(dataset) > LISTED:
        return Keyed(len(dataset), seed)
    return Shuffled(len(dataset), seed)
