"""The schedule of ring attention: which keys the queries of a rank see, and in which step.

The schedule below is that of causal attention. With a mask, or where all keys
are seen, every query meets every key: whole blocks in the same order.

With shift s rank r gets the keys and values of rank j = r - s. The queries stand in two halves, as
the chunks do (`group`):

    j = r    causal, as on one device: this rank's two chunks are in order
    j < r    all queries see the first half of j's keys, and nothing of its second
    j > r    the second half of the queries sees everything of j, the first half nothing

Few keys at a time cost more in starting kernels, adding up and waiting than in attention. So short
parts of the sequence are taken together. A step has as many shifts as give it `KEYS_PER_STEP` keys,
and its keys of one kind are one block. Longer parts are taken one by one, where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.parallel.context.group import ContextGroup

KEYS_PER_STEP = 128


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees.

    Attributes:
        causal: no key after it.
        documents: [batch, sequence], of packed sequences the document of each token: only keys of
            its own.
        mask: [1 or batch, 1 or heads, 1 or sequence / cp, sequence], of this rank's queries and all
            keys. Booleans, or numbers that are added to the scores. It says everything: `causal` is
            False with it.
    """

    causal: bool = True
    documents: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class AttentionBlock:
    """Rows of the queries, and the columns of the keys of some `ranks` that they see."""

    ranks: range
    rows: slice
    cols: slice
    repeats: int  # query heads of a key-value head
    causal: bool = False
    mask: Tensor | None = None

    def queries(self, x: Tensor) -> Tensor:
        """This block's rows of `x` [batch, heads, sequence / cp, ...]: a view."""
        return x[:, :, self.rows]

    def collect(self, arriving: Iterator[Tensor]) -> Tensor:
        """The visible keys and values of this block's ranks, [2, batch, kv_heads, keys, head_size].

        `arriving`: those of a rank, [2, batch, kv_heads, sequence / cp, head_size], from the last
        rank of the block to the first. Collective, as they arrive.
        """
        last = next(arriving)[:, :, :, self.cols]
        if len(self.ranks) == 1:
            return last
        seen = last.new_empty((*last.shape[:3], len(self.ranks), *last.shape[3:]))
        seen[:, :, :, -1].copy_(last)
        for index in reversed(range(len(self.ranks) - 1)):
            seen[:, :, :, index].copy_(next(arriving)[:, :, :, self.cols])
        return seen.flatten(3, 4)

    def by_head(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each [batch, heads, keys, head_size], with one head for each query head.

        `pair`: [2, batch, kv_heads, keys, head_size].
        """
        keys, values = pair.repeat_interleave(self.repeats, dim=2) if self.repeats > 1 else pair
        return keys, values

    def by_rank(self, grad: Tensor) -> Tensor:
        """The gradient of a block's keys or values by rank, summed over the queries' heads.

        [batch, heads, keys, head_size] -> [ranks, batch, kv_heads, keys / ranks, head_size].
        """
        grad = grad.unflatten(1, (-1, self.repeats)).sum(2) if self.repeats > 1 else grad
        return grad.unflatten(2, (len(self.ranks), -1)).movedim(2, 0)


@dataclass(frozen=True)
class RingStep:
    """The blocks of some shifts, which count down: ascending ranks, those after this one first."""

    shifts: range
    blocks: tuple[AttentionBlock, ...]

    def attend_to(self, arriving: Iterator[Tensor]) -> Iterator[tuple[AttentionBlock, Tensor]]:
        """Each block with the keys and values that it sees, of the shapes that `collect` has."""
        for block in self.blocks:
            yield block, block.collect(arriving)

    def gather(self, parts: Tensor, grads: Sequence[Sequence[Tensor]]) -> None:
        """Copy the gradients of each block's keys and values into `parts`.

        Args:
            parts: [shifts, 2, batch, kv_heads, sequence / cp, head_size].
            grads: for each block two tensors [batch, heads, keys, head_size].
        """
        stop = len(self.shifts)
        for block, both in zip(self.blocks, grads, strict=True):
            of_block = parts[stop - len(block.ranks) : stop]
            stop -= len(block.ranks)
            for index, grad in enumerate(both):
                of_block[:, index, :, :, block.cols].copy_(block.by_rank(grad))
            if block.cols.stop is not None:  # no query sees the rest
                of_block[:, :, :, :, block.cols.stop :].zero_()


class RingSchedule:
    """All blocks of one rank: `local`, then step by step. Masks are made when used."""

    def __init__(self, group: ContextGroup, repeats: int, visibility: Visibility) -> None:
        self._group = group
        self._repeats = repeats
        self._visibility = visibility
        self._rank = group.axis.rank
        self._size = group.axis.size
        self._length = group.length

    def local(self) -> AttentionBlock:
        """The block of this rank's own keys, which comes first."""
        return self._block(range(self._rank, self._rank + 1), slice(None), slice(None))

    def steps(self) -> Iterator[RingStep]:
        """The steps, each of equally many shifts; the last may have fewer."""
        paths = self._group.axis.paths
        num = max(1, paths.limit("context_keys", KEYS_PER_STEP) // self._length)
        if self._size > 2:
            paths.note("context_keys", num == 1)
        for first in range(1, self._size, num):
            yield self._step(first, min(first + num, self._size))

    def _step(self, first: int, stop: int) -> RingStep:
        """The step of shifts first .. stop - 1.

        Keys of the ranks before this one arrive first, then those after it, last to first.
        """
        rank = self._rank
        size = self._size
        half = self._length // 2
        before = range(max(0, rank - stop + 1), rank - first + 1)
        after = range(rank + size - stop + 1, size + min(0, rank - first + 1))
        first_half, second_half = slice(0, half), slice(half, None)
        if not self._visibility.causal:
            first_half = second_half = slice(None)
        blocks = []
        if before:
            blocks.append(self._block(before, slice(None), first_half))
        if after:
            blocks.append(self._block(after, second_half, slice(None)))
        return RingStep(range(stop - 1, first - 1, -1), tuple(blocks))

    def _block(self, ranks: range, rows: slice, cols: slice) -> AttentionBlock:
        visibility = self._visibility
        causal = visibility.causal and self._rank in ranks
        mask = None
        if visibility.documents is not None or visibility.mask is not None:
            theirs = torch.cat([self._group.positions(rank)[cols] for rank in ranks])
            mask = self._mask(self._group.positions()[rows], theirs)
            causal = False
        elif not visibility.causal and self._group.filling:
            mask = self._without_filling(ranks, cols)
        return AttentionBlock(ranks, rows, cols, self._repeats, causal=causal, mask=mask)

    def _without_filling(self, ranks: range, cols: slice) -> Tensor | None:
        """A mask [1, 1, 1, keys] that hides the filling; None where the ranks have none there.

        A causal schedule needs none: filling stands behind every query of the sequence.
        """
        theirs = torch.cat([self._group.positions(rank)[cols] for rank in ranks])
        seen = theirs < self._group.seq_len
        return None if bool(seen.all()) else seen[None, None, None]

    def _mask(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """The mask of a block, by the positions of its queries and keys."""
        whole = self._visibility.mask
        if whole is not None:
            return whole.index_select(-1, theirs.to(whole.device))
        documents = self._visibility.documents
        assert documents is not None
        same = documents[:, mine][:, :, None] == documents[:, theirs][:, None, :]
        if self._visibility.causal:
            same = same & (mine[:, None] >= theirs[None, :]).to(same.device)
        return same[:, None]
