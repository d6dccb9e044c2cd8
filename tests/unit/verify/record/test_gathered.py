"""Records that travel to the first rank: every bit arrives, and equal tensors are sent once."""

from __future__ import annotations

import pytest
import torch

from plait.mesh import Shard
from plait.mesh.boxes import Box
from plait.verify.record.gathered import pack, tensors_by_digest, unpack
from plait.verify.record.observe import RankRecord, assembled


def record(value: torch.Tensor) -> RankRecord:
    shape = tuple(value.shape)
    return RankRecord(
        [Shard("w", shape, Box.whole(shape), 0, value.numel(), value.reshape(-1))], []
    )


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_a_tensor_of_any_type_arrives(dtype: torch.dtype) -> None:
    value = torch.randn(3, 5).t().to(dtype)
    found = unpack(pack({"x": value, "none": None}, set()), {})
    assert torch.equal(found["x"], value) and found["x"].dtype == dtype
    found["x"].zero_()


def test_what_the_first_rank_has_is_not_sent_again() -> None:
    value = torch.randn(1000, dtype=torch.float64)
    table = tensors_by_digest(record(value))
    same = pack(record(value.clone()), set(table))
    assert len(same) < 1000
    assert unpack(same, table).start[0].values.data_ptr() == value.data_ptr()


def test_one_other_bit_is_sent() -> None:
    value = torch.randn(1000, dtype=torch.float64)
    other = value.clone()
    other[7] = torch.nextafter(other[7], torch.tensor(9.0, dtype=torch.float64))
    table = tensors_by_digest(record(value))
    found = unpack(pack(record(other), set(table)), table)
    assert torch.equal(found.start[0].values, other)
    assert not torch.equal(found.start[0].values, value)


def test_equal_bits_of_another_type_or_shape_are_another_tensor() -> None:
    value = torch.zeros(8, dtype=torch.float64)
    table = tensors_by_digest(value)
    for other in (torch.zeros(8, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.float64)):
        found = unpack(pack(other, set(table)), table)
        assert found.dtype == other.dtype and found.shape == other.shape


def test_a_whole_shard_is_the_tensor_and_later_ones_add_nothing() -> None:
    first = record(torch.randn(4))
    whole = assembled([first.start, record(torch.randn(4)).start])
    assert torch.equal(whole["w"], first.start[0].values)


def test_equal_tensors_of_one_item_stay_apart() -> None:
    """A frozen weight before and after a step; one memory for both reads as a view of it."""
    value = torch.randn(8, dtype=torch.float64)
    table = tensors_by_digest(value)
    before, after = unpack(pack([value.clone(), value.clone()], set(table)), table)
    assert torch.equal(before, after)
    assert before.data_ptr() != after.data_ptr()
