"""Rings of several buckets under way at once, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.comm import World, wait_all
from plait.parallel.data.ring import ring_all_reduce

Run = Callable[..., list[Any]]
SIZES = (12, 24 * 7, 12 * 400_000)  # elements of a bucket; the largest travels in segments


def exercise(world: World) -> None:
    axis = world.axis("dp")
    flats = [torch.arange(size, dtype=torch.float64) * (axis.rank + 1) for size in SIZES]
    total = axis.size * (axis.size + 1) // 2
    wait_all([ring_all_reduce(axis, flat, 0) for flat in flats])
    for size, flat in zip(SIZES, flats, strict=True):
        assert torch.equal(flat, torch.arange(size, dtype=torch.float64) * total)


@pytest.mark.parametrize("backend", ["native", "gloo", "shared"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_rings_at_once(ranks: Run, n: int, backend: str) -> None:
    ranks(n, exercise, backend=backend)
