"""Operations from and into memory of any strides, and borrowed operands, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm import World
from plait.comm.functional import compute_and_reduce
from plait.mesh.layouts import REPLICATED, Layout, Sharded
from tests.helpers.threaded import threaded

Run = Callable[..., list[Any]]
SHAPES = [(2, 12, 5), (3, 12, 70), (1, 12, 40_000)]  # the largest is summed in ranges


def operand(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).remainder_(7 + rank).view(shape).to(dtype) + rank


def exercise(world: World, dtype: torch.dtype) -> None:
    axis = world.axis("dp")
    for shape in SHAPES:
        operands = [operand(rank, shape, dtype) for rank in range(axis.size)]
        expected = torch.stack(operands).double().sum(0).to(dtype)
        own = operands[axis.rank]
        for source in (own, own.mT.contiguous().mT):
            out = torch.empty(shape, dtype=dtype)
            axis.all_reduce(source, out=out).wait()
            assert torch.equal(out, expected)
        assert torch.equal(computed(axis, own, REPLICATED), expected)
        assert torch.equal(own, operand(axis.rank, shape, dtype))  # it is kept
        parts = own.unflatten(1, (axis.size, -1)).movedim(1, 0)
        scattered = torch.empty(parts.shape[1:], dtype=dtype)
        axis.reduce_scatter(scattered, parts).wait()
        for piece in (scattered, computed(axis, own, Sharded(1))):
            assert torch.equal(piece, expected.unflatten(1, (axis.size, -1))[:, axis.rank])
            whole = torch.empty(shape, dtype=dtype)
            axis.all_gather(whole.unflatten(1, (axis.size, -1)).movedim(1, 0), piece).wait()
            assert torch.equal(whole, expected)


def computed(axis: Any, value: Tensor, target: Layout) -> Tensor:
    """The sum of `value`, which is written into a borrowed buffer."""
    return compute_and_reduce(axis, target, value.shape, value, lambda buffer: buffer.copy_(value))


@pytest.mark.parametrize("backend", ["native", "gloo", "shared"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_strides_and_borrowed_memory(ranks: Run, n: int, backend: str) -> None:
    ranks(n, exercise, torch.float64, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_strides_on_simulated_ranks(n: int, dtype: torch.dtype) -> None:
    threaded(n, exercise, dtype)


def reuse(world: World) -> int:
    """Borrowed memory comes back once its operation is over."""
    axis = world.axis("dp")
    seen = set()
    for _ in range(8):
        compute_and_reduce(
            axis,
            REPLICATED,
            (1000,),
            torch.empty(0),
            lambda buffer: seen.add(buffer.zero_().data_ptr()),
        )
        axis.barrier()
    return len(seen)


def test_borrowed_memory_is_lent_again(ranks: Run) -> None:
    assert max(ranks(2, reuse, backend="shared")) <= 2
