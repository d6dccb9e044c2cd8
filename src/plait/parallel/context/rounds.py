"""The way round the ring: which keys the queries of a rank see, and which of them it meets at once.

In step s rank r meets the keys and values of rank j = r - s. The queries stand in two halves, as
the chunks do (`group`):

    j = r    causal, as on one device: the own two chunks are in order
    j < r    all queries see the first half of j's keys, and nothing of its second
    j > r    the second half of the queries sees everything of j, the first half nothing

Few keys at a time cost more in starting kernels, adding up and waiting than in attention. So short
parts of the sequence are met several at once: steps make a round of up to `MET_AT_ONCE` keys, and
in a round those of one kind are one visit. Longer parts are met one by one, where they lie. Shapes:
B samples, G key-value heads, J keys, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.parallel.context.group import ContextGroup

MET_AT_ONCE = 128


@dataclass(frozen=True)
class Visit:
    """Some rows of the queries, and those columns of the keys and values of some `ranks`
    (ascending) that they see.
    """

    ranks: range
    rows: slice
    cols: slice
    repeats: int  # query heads of a key-value head
    causal: bool = False
    mask: Tensor | None = None

    def queries(self, x: Tensor) -> Tensor:
        """Those of x [B, H, S here, ..]."""
        return x[:, :, self.rows]

    def collect(self, shown: Iterator[Tensor]) -> Tensor:
        """The keys and values [2, B, G, J, K] that are seen of those that come, from the last rank
        to the first.
        """
        last = next(shown)[:, :, :, self.cols]
        if len(self.ranks) == 1:
            return last
        seen = last.new_empty((*last.shape[:3], len(self.ranks), *last.shape[3:]))
        seen[:, :, :, -1].copy_(last)
        for index in reversed(range(len(self.ranks) - 1)):
            seen[:, :, :, index].copy_(next(shown)[:, :, :, self.cols])
        return seen.flatten(3, 4)

    def by_head(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with one head for each query head."""
        keys, values = pair.repeat_interleave(self.repeats, dim=2) if self.repeats > 1 else pair
        return keys, values

    def by_rank(self, grad: Tensor) -> Tensor:
        """The inverse, for a gradient [B, H, J, K]: of each rank, summed over the queries' heads.
        [ranks, B, G, J of one, K]
        """
        grad = grad.unflatten(1, (-1, self.repeats)).sum(2) if self.repeats > 1 else grad
        return grad.unflatten(2, (len(self.ranks), -1)).movedim(2, 0)


@dataclass(frozen=True)
class Round:
    """The visits of some steps, which count down: by ascending rank, those after this one first."""

    steps: range
    visits: tuple[Visit, ...]

    def meet(self, shown: Iterator[Tensor]) -> Iterator[tuple[Visit, Tensor]]:
        """Each visit with the keys and values that it sees."""
        for visit in self.visits:
            yield visit, visit.collect(shown)

    def gather(self, parts: Tensor, grads: Sequence[Sequence[Tensor]]) -> None:
        """The gradients of each visit's keys and values, by rank: `parts` [steps, 2, B, G, S here,
        K].
        """
        stop = len(self.steps)
        for visit, both in zip(self.visits, grads, strict=True):
            place = parts[stop - len(visit.ranks) : stop]
            stop -= len(visit.ranks)
            for index, grad in enumerate(both):
                place[:, index, :, :, visit.cols].copy_(visit.by_rank(grad))
            if visit.cols.stop is not None:  # nobody sees the rest
                place[:, :, :, :, visit.cols.stop :].zero_()


class Way:
    """All visits of one rank: `own`, then round by round. Masks are made where they are used, and
    not kept.
    """

    def __init__(self, group: ContextGroup, repeats: int, documents: Tensor | None) -> None:
        self._group = group
        self._repeats = repeats
        self._documents = documents
        self._rank = group.axis.rank
        self._size = group.axis.size
        self._length = group.seq_len // self._size

    def own(self) -> Visit:
        """What comes first."""
        return self._visit(range(self._rank, self._rank + 1), slice(None), slice(None))

    def rounds(self) -> Iterator[Round]:
        """Of as many steps each; the last may have fewer."""
        paths = self._group.axis.paths
        num = max(1, paths.limit("context_keys", MET_AT_ONCE) // self._length)
        if self._size > 2:
            paths.note("context_keys", num == 1)
        for first in range(1, self._size, num):
            yield self._round(first, min(first + num, self._size))

    def _round(self, first: int, stop: int) -> Round:
        """Steps first .. stop - 1: of the ranks before this one, then of those after it, which come
        last to first.
        """
        rank = self._rank
        size = self._size
        half = self._length // 2
        before = range(max(0, rank - stop + 1), rank - first + 1)
        after = range(rank + size - stop + 1, size + min(0, rank - first + 1))
        visits = []
        if before:
            visits.append(self._visit(before, slice(None), slice(0, half)))
        if after:
            visits.append(self._visit(after, slice(half, None), slice(None)))
        return Round(range(stop - 1, first - 1, -1), tuple(visits))

    def _visit(self, ranks: range, rows: slice, cols: slice) -> Visit:
        if self._documents is None:
            return Visit(ranks, rows, cols, self._repeats, causal=self._rank in ranks)
        mine = self._group.positions()[rows]
        theirs = torch.cat([self._group.positions(rank)[cols] for rank in ranks])
        same = self._documents[:, mine][:, :, None] == self._documents[:, theirs][:, None, :]
        seen = same & (mine[:, None] >= theirs[None, :]).to(same.device)
        return Visit(ranks, rows, cols, self._repeats, mask=seen[:, None])
