"""Readable memory: it is found again, packed, freed with its last tensor; staging reuses what was
returned.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from plait.comm.shm.memory import ALIGNMENT, ARENA_BYTES, MappedMemory, Staging
from plait.comm.shm.semaphores import available

pytestmark = pytest.mark.skipif(
    not available(), reason="needs anonymous files and process-shared semaphores (Linux)"
)


DESCRIPTORS_PER_SEGMENT = 2  # our own, and the copy that Python's mmap keeps


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_tensors_are_found_by_any_part_of_them():
    memory = MappedMemory()
    large = memory.empty(ARENA_BYTES, torch.float32)
    small = memory.empty(10, torch.float64)
    other = memory.empty(3, torch.bfloat16)
    assert memory.place(large[7:9]).offset == 28
    assert memory.place(small).number == memory.place(other).number
    assert memory.place(other).offset % ALIGNMENT == 0
    assert memory.place(torch.empty(10)) is None
    assert memory.place(torch.empty(0)) is None


def test_another_mapping_sees_the_same_bytes():
    memory = MappedMemory()
    reader = MappedMemory()
    mine = memory.empty(1000, torch.int32).copy_(torch.arange(1000))
    seen = reader.peer(os.getpid(), memory.place(mine[100:]), torch.int32, 900)
    assert torch.equal(seen, mine[100:])
    mine[100] = -5
    assert seen[0] == -5


def test_memory_is_freed_with_the_last_tensor_on_it():
    memory = MappedMemory()
    gc.collect()  # files that other tests have left are closed before they are counted
    before = _num_descriptors()
    large = memory.empty(ARENA_BYTES, torch.uint8)
    part = large[5:10]
    assert _num_descriptors() <= before + DESCRIPTORS_PER_SEGMENT
    del large
    gc.collect()
    assert memory.place(part) is not None
    address = part.data_ptr()
    del part
    gc.collect()
    assert _num_descriptors() == before
    assert memory._bases == [base for base in memory._bases if base != address - 5]


def test_many_small_pieces_need_few_descriptors():
    memory = MappedMemory()
    gc.collect()  # files that other tests have left are closed before they are counted
    before = _num_descriptors()
    kept = [memory.empty(1000, torch.float32) for _ in range(900)]
    assert _num_descriptors() <= before + DESCRIPTORS_PER_SEGMENT
    memory.close()
    del kept
    gc.collect()
    assert _num_descriptors() == before


def test_staging_lends_the_last_returned_block_first():
    memory = MappedMemory()
    staging = Staging(memory)
    first = staging.borrow(1000, torch.float32)
    second = staging.borrow(1024, torch.float32)
    address = second.tensor.data_ptr()
    assert first.tensor.data_ptr() != address
    first.release()
    second.release()
    assert staging.borrow(4000, torch.uint8).tensor.data_ptr() == address
    assert memory.place(staging.borrow(100_000, torch.float64).tensor) is not None
    assert staging.borrow(0, torch.float32).tensor.numel() == 0


def test_a_segment_stays_where_another_one_ended_at_its_address() -> None:
    """The system may give an address to one thread before another is told of its end."""
    memory = MappedMemory()
    tensor = memory.empty(4, torch.float32)
    memory._unmap(memory._bases[0], os.open(os.devnull, os.O_RDONLY))
    assert memory.place(tensor) is not None
