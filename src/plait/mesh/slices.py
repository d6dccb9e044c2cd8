"""Balanced ranges: which part of `numel` things belongs to rank `index` of `size`.

Parts are balanced (sizes differ by at most one, larger ones first) rather than padded. So no rank
stores or sends padding. Every rank can compute every other rank's range without asking.
"""

from __future__ import annotations


def shard_range(numel: int, size: int, index: int) -> tuple[int, int]:
    """The half-open range [start, stop) of part `index` when `numel` things are cut into `size`
    balanced parts.

    >>> [shard_range(10, 4, k) for k in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    base, extra = divmod(numel, size)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def shard_sizes(numel: int, size: int) -> tuple[int, ...]:
    """The lengths of all `size` balanced parts of `numel` things.

    >>> shard_sizes(10, 4)
    (3, 3, 2, 2)
    """
    base, extra = divmod(numel, size)
    return tuple(base + (index < extra) for index in range(size))
