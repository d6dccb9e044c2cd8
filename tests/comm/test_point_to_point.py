"""Sends and receives: order, tags, many under way, wrong lengths; on every backend and on simulated
ranks.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from plait.comm.functional import compute_and_shift
from plait.errors import PlanError, RunError
from plait.mesh import Mesh
from tests.helpers.threaded import threaded


def _by_order_and_tag(world):
    axis = world.axis("pp")
    if axis.rank == 0:
        works = [axis.send(torch.full((k + 1,), float(k)), 1, tag=k % 3) for k in range(12)]
        for work in works:
            work.wait()
        return None
    received = {}
    works = []
    for tag in (2, 0, 1):  # another order than that of sending; within a tag the order of sending
        for k in range(tag, 12, 3):
            received[k] = torch.empty(k + 1)
            works.append(axis.receive(received[k], 0, tag=tag))
    random.Random(0).shuffle(works)
    for work in works:
        work.wait()
    return [received[k].tolist() == [float(k)] * (k + 1) for k in range(12)]


def _ring(world):
    """Everyone sends before anyone receives; 200 rounds reuse every slot and block of memory."""
    axis = world.axis("world")
    value = torch.full((3000,), float(axis.rank))
    for step in range(200):
        sent = axis.send(value, (axis.rank + 1) % axis.size)
        arrived = torch.empty_like(value)
        axis.receive(arrived, (axis.rank - 1) % axis.size).wait()
        sent.wait()
        value = arrived
        assert value[0] == (axis.rank - step - 1) % axis.size
    return (
        world.ledger.num(op="send"),
        world.ledger.bytes(op="send"),
        world.ledger.num(op="receive"),
    )


def _shifts(world):
    axis = world.axis("world")
    out = torch.empty(5)
    for by in range(-axis.size, axis.size + 1):
        axis.shift(out, torch.full((5,), float(axis.rank)), by).wait()
        assert out.tolist() == [(axis.rank - by) % axis.size] * 5


def _rotations(world):
    """Memory is used again at once, and other operations are issued while the own tensor is still
    being looked at.
    """
    axis = world.axis("world")
    for turn in range(60):
        value = torch.full((2, 300), float(100 * turn + axis.rank))
        seen = []
        for step, shown in enumerate(axis.rotate(value[0], value[1])):
            seen.append(float(shown[1, step % 300]))
            axis.shift(torch.empty(3), torch.full((3,), float(step))).wait()
            assert torch.equal(
                shown, torch.full((2, 300), 100.0 * turn + (axis.rank - step) % axis.size)
            )
        assert seen == [100 * turn + (axis.rank - step) % axis.size for step in range(axis.size)]
        if turn % 7 == axis.rank:
            axis.all_reduce(torch.ones(2), control=True)
        elif turn % 7 < axis.size:
            axis.all_reduce(torch.ones(2), control=True).wait()
    return world.ledger.bytes(op="shift")


@pytest.mark.parametrize("backend", ["gloo", "shared", "threads"])
def test_rotations(ranks, backend):
    for n in (1, 2, 4):
        run = threaded if backend == "threads" else ranks
        options = {} if backend == "threads" else {"backend": backend}
        shifts = 60 * (n - 1) * 2 * 300 * 4 + (60 * n * 12 if n > 1 else 0)
        assert run(n, _rotations, plan=Mesh(pp=n), **options) == [shifts] * n


def _wrong_blocks(world):
    axis = world.axis("world")
    rotated = axis.rotate(torch.full((50,), float(axis.rank)))
    return sum(
        int(not torch.equal(shown[0], torch.full((50,), float((axis.rank - step) % axis.size))))
        for step, shown in enumerate(rotated)
    )


def test_rotations_of_more_ranks_than_can_read_each_others_memory():
    many = 33
    assert threaded(many, _wrong_blocks, plan=Mesh(pp=many)) == [0] * many


def _fill(rank, parts):
    for index, part in enumerate(parts):
        part.fill_(10 * index + rank)


def _added_shifts(world):
    """Of every subset of the others, in every precision; what is lent for it is lent again."""
    axis = world.axis("world")
    for by in ([1], [-1], list(range(1, axis.size)), list(range(1 - axis.size, 0)), [2, -1]):
        if any(each % axis.size == 0 for each in by):
            continue
        for dtype in (torch.float64, torch.bfloat16):
            out = torch.full((2, 3), 50.0 * axis.rank, dtype=dtype)
            compute_and_shift(axis, out, by, partial(_fill, axis.rank)).wait()
            came = sum(10 * index + (axis.rank - each) % axis.size for index, each in enumerate(by))
            assert out.tolist() == [[50 * axis.rank + came] * 3] * 2
    return world.ledger.bytes(op="shift")


@pytest.mark.parametrize("backend", ["gloo", "shared", "threads"])
def test_shifts_are_added_up(ranks, backend):
    for n, num_parts in ((2, 4), (4, 10)):
        run = threaded if backend == "threads" else ranks
        options = {} if backend == "threads" else {"backend": backend}
        assert run(n, _added_shifts, plan=Mesh(pp=n), **options) == [num_parts * 6 * (8 + 2)] * n


def test_a_shift_to_oneself_is_no_shift():
    with pytest.raises(PlanError, match=r"by \[2\] leads back to this rank"):
        threaded(
            2,
            lambda world: compute_and_shift(
                world.axis("pp"), torch.ones(3), [2], torch.Tensor.zero_
            ),
            plan=Mesh(pp=2),
        )


@pytest.mark.parametrize("backend", ["gloo", "shared", "threads"])
def test_point_to_point(ranks, backend):
    def run(n, fn):
        mesh = Mesh(pp=n)
        return (
            threaded(n, fn, plan=mesh)
            if backend == "threads"
            else ranks(n, fn, plan=mesh, backend=backend)
        )

    assert run(2, _by_order_and_tag)[1] == [True] * 12
    for n in (2, 4):
        assert run(n, _ring) == [(200, 200 * 3000 * 4, 0)] * n
        run(n, _shifts)


def _more_than_the_box_holds(world):
    axis = world.axis("pp")
    if axis.rank == 0:
        for k in range(300):
            axis.send(torch.tensor([k]), 1).wait()
        return []
    arrived = [torch.empty(1, dtype=torch.int64) for _ in range(300)]
    for tensor in arrived:
        axis.receive(tensor, 0).wait()
    return [int(t) for t in arrived]


def test_a_full_box_blocks_the_sender_until_it_is_read(ranks):
    assert ranks(2, _more_than_the_box_holds, plan=Mesh(pp=2), backend="shared")[1] == list(
        range(300)
    )


def _wrong_length(world):
    axis = world.axis("pp")
    if axis.rank == 0:
        axis.send(torch.zeros(3), 1).wait()
    else:
        with pytest.raises(
            RunError, match=r"receive on axis pp .* sent 3 torch.float32 and 4 torch.float32"
        ):
            axis.receive(torch.zeros(4), 0).wait()


def test_a_message_of_another_length_is_refused(ranks):
    ranks(2, _wrong_length, plan=Mesh(pp=2), backend="shared")
