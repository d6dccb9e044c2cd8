"""Sums of halves over Gloo: two bytes a number on the way, as counted, and one rounding of a sum in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm import Axis, World
from plait.comm.functional import transition
from plait.mesh.layouts import INVARIANT, PARTIAL, Sharded
from plait.paths import Paths
from tests.comm.test_operations import WAYS

Run = Callable[..., list[Any]]
LARGE = 3 << 18
"""Numbers of which two ranks' halves are beyond the limit of small sums, and divide by 2 to 4."""


ROUNDING = 2.0**-8
"""Of a number to bf16, relative, at most."""


class Sent:
    """The bytes that this rank hands to Gloo for others, and calls of Gloo's own sum."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_rings = 0

    def counting(self) -> Any:
        send = dist.isend
        ring = dist.all_reduce
        exchange = dist.all_to_all_single

        def counted(tensor: Tensor, *given: Any, **named: Any) -> Any:
            self.num_bytes += tensor.nbytes
            return send(tensor, *given, **named)

        def exchanged(
            out: Tensor, source: Tensor, taken: list[int], given: list[int], **named: Any
        ) -> Any:
            own = dist.get_rank(named["group"])
            others = sum(rows for rank, rows in enumerate(given) if rank != own)
            self.num_bytes += others * source.element_size()
            return exchange(out, source, taken, given, **named)

        def noted(*given: Any, **named: Any) -> Any:
            self.num_rings += 1
            return ring(*given, **named)

        return patch.multiple(dist, isend=counted, all_reduce=noted, all_to_all_single=exchanged)


def parts(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """What each rank adds, of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * 8.0**rank).to(dtype) for rank in range(size)]


def summed(every: list[Tensor]) -> Tensor:
    """The sum in float32 by coordinates, rounded once."""
    total = every[0].float()
    for other in every[1:]:
        total = total + other.float()
    return total.to(every[0].dtype)


def by_direct_sends(world: World) -> Axis:
    """An axis all of whose messages take the way of large ones."""
    axis = world.axis("tp")
    axis._backend.follow(Paths(dict.fromkeys(WAYS, 0)))  # type: ignore[union-attr]
    return axis


def _large(world: World, dtype: torch.dtype) -> tuple[int, int, int, bool]:
    """Bytes that were handed over and counted, rings, and whether the sum is right."""
    axis = by_direct_sends(world)
    every = parts(world.size, (LARGE,), dtype)
    own = every[world.rank]
    kept = own.clone()
    before = axis.ledger.by_axis().get("tp", 0)
    sent = Sent()
    with sent.counting():
        total = transition(own, axis, PARTIAL, INVARIANT)
    counted = axis.ledger.by_axis()["tp"] - before
    right = torch.equal(total, summed(every)) and torch.equal(own, kept)
    return sent.num_bytes, counted, sent.num_rings, right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_is_sent_is_what_is_counted(ranks: Run, n: int, dtype: torch.dtype) -> None:
    """Not float32, as Gloo's own ring would need."""
    counted = 2 * (n - 1) * (2 * LARGE) // n
    assert (
        ranks(n, _large, dtype, plan=f"tp{n}", backend="gloo") == [(counted, counted, 0, True)] * n
    )


def _any_shape(world: World) -> None:
    axis = by_direct_sends(world)
    for shape in ((1,), (5,), (3, 7), (4, 6)):
        for dtype in (torch.bfloat16, torch.float16):
            every = parts(world.size, shape, dtype)
            own = every[world.rank]
            wanted = summed(every)
            assert torch.equal(transition(own, axis, PARTIAL, INVARIANT), wanted)
            # of other strides
            across = own.T.contiguous().T if len(shape) > 1 else own
            assert torch.equal(transition(across, axis, PARTIAL, INVARIANT), wanted)
    with_dims = parts(world.size, (4 * world.size, 3), torch.bfloat16)
    own_rows = transition(with_dims[world.rank], axis, PARTIAL, Sharded(0))
    assert torch.equal(own_rows, summed(with_dims).chunk(world.size)[world.rank])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_of_any_shape_are_rounded_once(ranks: Run, n: int) -> None:
    ranks(n, _any_shape, plan=f"tp{n}", backend="gloo")


def _compressed(world: World) -> tuple[int, int, bool]:
    """A float32 sum whose messages are rounded: bytes handed over and counted, and its error."""
    axis = by_direct_sends(world).rounding(torch.bfloat16)
    every = parts(world.size, (LARGE,), torch.float32)
    sent = Sent()
    with sent.counting():
        total = transition(every[world.rank], axis, PARTIAL, INVARIANT)
    sizes = torch.stack(every).abs().sum(0)
    exact = torch.stack(every).double().sum(0)
    near = bool(((total - exact).abs() <= 2.01 * ROUNDING * sizes).all())
    return sent.num_bytes, axis.ledger.by_axis()["tp"], near


@pytest.mark.parametrize("n", [2, 4])
def test_rounded_messages_take_half_and_are_off_by_two_roundings(ranks: Run, n: int) -> None:
    """One of each summand and one of their sum, whatever the number of ranks."""
    counted = 2 * (n - 1) * (2 * LARGE) // n
    answers = ranks(n, _compressed, plan=f"tp{n}", backend="gloo")
    assert answers == [(counted, counted, True)] * n


def _under_way(world: World) -> bool:
    """Sums in place that go on beside others, waited for in another order on each rank."""
    axis = world.axis("tp")
    every = [parts(world.size, (LARGE + 12 * index,), torch.bfloat16) for index in range(3)]
    mine = [one[world.rank].clone() for one in every]
    works = [axis.all_reduce(tensor) for tensor in mine]
    for work in works if world.rank == 0 else reversed(works):
        work.wait()
    gaps = [
        (own.float() - summed(one).float()).abs() <= 2.0**-7 * sum(part.abs() for part in one)
        for own, one in zip(mine, every, strict=True)
    ]
    return all(bool(gap.all()) for gap in gaps)


@pytest.mark.parametrize("n", [2, 3])
def test_sums_under_way_may_be_waited_for_in_any_order(ranks: Run, n: int) -> None:
    assert all(ranks(n, _under_way, plan=f"tp{n}", backend="gloo"))
