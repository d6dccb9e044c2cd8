"""Balanced ranges: they cover, in order, and differ by at most one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from plait.mesh import shard_range, shard_sizes


@given(st.integers(0, 1000), st.integers(1, 40))
def test_ranges_cover_in_order_and_are_balanced(numel, size):
    ranges = [shard_range(numel, size, index) for index in range(size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert tuple(sizes) == shard_sizes(numel, size)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
