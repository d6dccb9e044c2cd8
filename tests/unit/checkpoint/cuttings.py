"""Random cuttings of tensors over simulated ranks, and `save` on ranks that are threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint import Box, Shard, save


def cut_box(numel_cut: Callable[[int], list[int]], shape: Sequence[int]) -> list[Box]:
    """Boxes that part a tensor: a grid, as tensor axes give."""
    boxes = [Box((), ())]
    for size in shape:
        ends = [0, *numel_cut(size), size]
        parts = list(itertools.pairwise(ends))
        boxes = [
            Box((*box.offset, low), (*box.extent, high - low))
            for box in boxes
            for low, high in parts
        ]
    return boxes


def cut_shards(numel_cut: Callable[[int], list[int]], name: str, full: Tensor) -> list[Shard]:
    """Flat ranges of boxes that part a tensor, with their values: as ZeRO over a tensor axis
    gives.
    """
    shards = []
    for box in cut_box(numel_cut, full.shape):
        flat = full[box.within(Box.whole(full.shape))].reshape(-1)
        ends = [0, *numel_cut(box.numel), box.numel]
        shards += [
            Shard(name, tuple(full.shape), box, low, high, flat[low:high].clone())
            for low, high in itertools.pairwise(ends)
        ]
    return shards


def blank(shard: Shard, dtype: torch.dtype | None = None) -> Shard:
    """The same elements, with values that are surely wrong."""
    wrong = torch.full(shard.values.shape, 77, dtype=dtype or shard.values.dtype)
    return Shard(shard.name, shard.global_shape, shard.box, shard.start, shard.stop, wrong)


def save_on(
    directory: Path, shards: Sequence[Sequence[Shard]], meta: dict[str, Any] | None = None
) -> list[BaseException | Path]:
    """`save` on len(shards) ranks, each a thread; what each returned or raised."""
    world_size = len(shards)
    barrier = threading.Barrier(world_size, timeout=10)
    table: list[Any] = [None] * world_size
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        def gather(item: Any) -> list[Any]:
            table[rank] = item
            barrier.wait()
            found = list(table)
            barrier.wait()
            return found

        try:
            results[rank] = save(
                directory, shards[rank], meta or {}, rank=rank, world_size=world_size, gather=gather
            )
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, Exception):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
