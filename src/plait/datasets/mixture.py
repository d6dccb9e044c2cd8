"""A mixture: samples drawn from several sets by weight; any place is found without those before.

Places go in blocks of a fixed length. Each block takes a fixed number of samples of every set, in
an order that is shuffled by a key. So the count of a set's samples before a block is a product. A
set gives each of its samples once before it gives one twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from plait.datasets.collate import Batch, collate
from plait.datasets.hashing import seed_of
from plait.datasets.order import Order, order_of
from plait.datasets.permutation import KeyedPermutation
from plait.datasets.sample_set import SampleSet
from plait.datasets.text import Windows
from plait.errors import DataError
from plait.values import PyTree

BLOCK: Final = 1024
"""Places of a block: a weight is kept to one part in so many."""


@dataclass(frozen=True)
class WeightPhase:
    """A stretch of places with one set of weights.

    Attributes:
        start: its first place.
        quotas: samples of each set in every block.
        before: samples that each set has given before `start`.
    """

    start: int
    quotas: tuple[int, ...]
    before: tuple[int, ...]


class SampleMixture(Dataset[PyTree]):
    """Samples of several sets, drawn by weight; a place of the stream is an index.

    Attributes:
        draws: the loader reads a mixture place by place, in one epoch without end.
    """

    draws = True

    def __init__(
        self,
        sets: Sequence[SampleSet],
        weights: Sequence[Sequence[float]],
        starts: Sequence[int] = (0,),
        seed: int = 0,
    ) -> None:
        """`weights` holds the weights of all sets for each phase, which begins at its place of
        `starts`.
        """
        self.sets = tuple(sets)
        self._seed = seed
        self._orders: list[Order] = [
            order_of(one, seed_of(seed, "set", number)) for number, one in enumerate(sets)
        ]
        self._blocks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._phases: list[WeightPhase] = []
        before = (0,) * len(self.sets)
        for start, given in zip(starts, weights, strict=True):
            if self._phases:
                before = self._counts(len(self._phases) - 1, start)
            self._phases.append(WeightPhase(start, quotas(given), before))
        words = [(_content_of(one), len(one)) for one in self.sets]
        about = repr((words, [phase.quotas for phase in self._phases], list(starts)))
        digest = hashlib.blake2b(about.encode(), digest_size=8).digest()
        self.content = int.from_bytes(digest, "little") >> 2
        self.num_bad = sum(getattr(one, "num_bad", None) or 0 for one in self.sets)

    def __len__(self) -> int:
        return sum(len(one) for one in self.sets)

    def __getitem__(self, index: int) -> PyTree:
        number, sample = self.drawn(index)
        return self.sets[number][sample]

    def batch(self, indices: Tensor) -> Batch:
        """Samples [B] at places of the stream, stacked."""
        if len(indices) == 0:
            return collate(self.sets[0], indices)
        samples: list[PyTree] = [None] * len(indices)
        drawn = [self._drawn(place) for place in indices.tolist()]
        for number, one in enumerate(self.sets):
            rows = [row for row, (owner, _) in enumerate(drawn) if owner == number]
            if not rows:
                continue
            found = self._samples_of(number, [drawn[row][1] for row in rows])
            batch = collate(one, found)
            for at, row in enumerate(rows):
                samples[row] = tree_map(itemgetter(at), batch)
        whole: Batch = _stacked(samples)
        return whole

    def drawn(self, place: int) -> tuple[int, int]:
        """The set and the sample in it that stand at a place."""
        number, count = self._drawn(place)
        return number, int(self._samples_of(number, [count])[0])

    def _drawn(self, place: int) -> tuple[int, int]:
        """The set of a place, and how many samples it has given before."""
        phase = self._phase_of(place)
        at = self._phases[phase]
        block, offset = divmod(place - at.start, BLOCK)
        owners, ranks = self._block(phase, block)
        number = int(owners[offset])
        return number, at.before[number] + at.quotas[number] * block + int(ranks[offset])

    def _samples_of(self, number: int, counts: Sequence[int]) -> Tensor:
        """The samples of a set that come after so many others of it."""
        order = self._orders[number]
        size = order.num_samples
        samples = torch.empty(len(counts), dtype=torch.long)
        by_epoch: dict[int, list[int]] = {}
        for at, count in enumerate(counts):
            by_epoch.setdefault(count // size, []).append(at)
        for epoch, rows in by_epoch.items():
            places = [counts[row] % size for row in rows]
            first = min(places)
            if max(places) - first < 2 * BLOCK:  # as in a batch, whose places are neighbours
                stretch = order.at(epoch, first, max(places) + 1)
                samples[rows] = stretch[torch.tensor(places) - first]
                continue
            samples[rows] = torch.cat([order.at(epoch, place, place + 1) for place in places])
        return samples

    def _phase_of(self, place: int) -> int:
        return max(n for n, phase in enumerate(self._phases) if phase.start <= place)

    def _counts(self, phase: int, place: int) -> tuple[int, ...]:
        """Samples that each set has given before a place that a phase reaches."""
        at = self._phases[phase]
        block, offset = divmod(place - at.start, BLOCK)
        owners, _ = self._block(phase, block)
        part = torch.bincount(owners[:offset], minlength=len(self.sets)).tolist()
        return tuple(
            before + quota * block + more
            for before, quota, more in zip(at.before, at.quotas, part, strict=True)
        )

    def _block(self, phase: int, block: int) -> tuple[Tensor, Tensor]:
        """The set at each place of a block, and how often it stands before, each [BLOCK]."""
        owners_and_ranks = self._blocks.get((phase, block))
        if owners_and_ranks is None:
            edges = torch.tensor(list(accumulate(self._phases[phase].quotas)))
            shuffled = KeyedPermutation(BLOCK, seed_of(self._seed, "block", phase, block))
            owners = torch.searchsorted(edges, shuffled(torch.arange(BLOCK)), right=True)
            ranks = torch.empty_like(owners)
            for number in range(len(self.sets)):
                mine = owners == number
                ranks[mine] = torch.arange(int(mine.sum()))
            owners_and_ranks = owners, ranks
            self._blocks = {(phase, block): owners_and_ranks}  # threads may be in different blocks
        return owners_and_ranks


def _stacked(samples: Sequence[PyTree]) -> PyTree:
    """Samples of several sets as one batch."""
    try:
        return tree_map(lambda *parts: torch.stack(parts), samples[0], *samples[1:])
    except (RuntimeError, ValueError) as failure:
        raise DataError(
            f"the sets of a mixture have samples that cannot be stacked: {failure}"
        ) from failure


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """The samples of each set in a block, by the largest remainders; at least one of every set.

    >>> quotas([3, 1])
    (768, 256)

    Raises:
        DataError: weights that are not positive.
    """
    total = sum(weights)
    if not total > 0 or min(weights) < 0:
        raise DataError(f"the weights {list(weights)} of a mixture must be positive")
    shares = [weight * BLOCK / total for weight in weights]
    counts = [max(int(share), int(share > 0)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda n: counts[n] - shares[n])
    for number in by_remainder[: max(0, BLOCK - sum(counts))]:
        counts[number] += 1
    while sum(counts) > BLOCK:
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


def _content_of(one: SampleSet) -> int | None:
    """The checksum of a set in that of a mixture.

    Texts have none there, as places were saved before they had one.
    """
    return None if isinstance(one, Windows) else getattr(one, "content", None)
