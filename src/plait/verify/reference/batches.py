"""The samples of a global batch: how many they are, and some of them.

It counts and takes samples by itself; how the engine cuts a batch is not asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plait.batch_trees import is_per_sample, map_held, num_rows
from plait.values import PyTree

Batch = tuple[PyTree, PyTree]


def num_samples(batch: Batch) -> int:
    """The number of samples of a batch."""
    return num_rows(*batch) or 0


def taken(batch: Batch, rows: Sequence[int]) -> Batch:
    """Samples of a batch, by their numbers."""
    part: Batch = taken_of(batch, rows, num_samples(batch))
    return part


def taken_of(tree: PyTree, rows: Sequence[int], count: int) -> PyTree:
    """Samples of a part of a batch of `count` samples, such as its inputs, by their numbers."""
    place = slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)

    def part(leaf: PyTree, held: bool) -> PyTree:
        if isinstance(leaf, Tensor):
            stays = leaf.dim() == 0 or (held and leaf.size(0) != count)
            return leaf if stays else leaf[place]
        if is_per_sample(leaf) and len(leaf) == count:
            return type(leaf)(leaf[row] for row in rows)
        return leaf

    return map_held(part, tree)
