from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait.parallel.data.bucket import Bucket

shapes = st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=6)


def bucket_of(shape_list: list[list[int]], num_shards: int) -> Bucket:
    return Bucket.of(
        "b",
        [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shape_list)],
        num_shards,
    )


@given(shapes, st.integers(1, 7))
def test_shards_are_balanced_and_cover_every_element_once(
    shape_list: list[list[int]], num_shards: int
) -> None:
    bucket = bucket_of(shape_list, num_shards)
    assert 0 <= bucket.padding < num_shards
    assert bucket.padded_numel == num_shards * bucket.shard_numel
    seen = {slot.name: torch.zeros(slot.numel, dtype=torch.int) for slot in bucket.slots}
    for index in range(num_shards):
        for part in bucket.shard_parts(index):
            seen[part.slot.name][part.start : part.stop] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


@given(shapes, st.integers(1, 4))
def test_parts_and_views_see_the_same_memory(shape_list: list[list[int]], num_shards: int) -> None:
    bucket = bucket_of(shape_list, num_shards)
    flat = torch.arange(bucket.padded_numel, dtype=torch.float64)
    for view, slot in zip(bucket.views(flat), bucket.slots, strict=True):
        assert view.shape == slot.shape
        assert view.reshape(-1).tolist() == flat[slot.offset : slot.stop].tolist()
    for index in range(num_shards):
        shard = bucket.shard(flat, index)
        for part in bucket.shard_parts(index):
            start = part.slot.offset + part.start
            assert (
                part.view(shard).reshape(-1).tolist() == flat[start : start + part.numel].tolist()
            )


def test_a_whole_part_keeps_the_shape_of_its_parameter() -> None:
    bucket = bucket_of([[2, 3], [4]], 1)
    whole, vector = bucket.shard_parts(0)
    flat = torch.zeros(bucket.padded_numel)
    assert whole.view(flat).shape == (2, 3)
    assert vector.view(flat).shape == (4,)
