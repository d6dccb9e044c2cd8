"""A rank that dies, leaves, hangs or calls something else: its peers fail soon, and say what and
where.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plait.comm.world import init
from plait.errors import RankFailed, RunError
from plait.mesh import Mesh
from tests.helpers.threaded import threaded


def _die(world, op):
    axis = world.axis("dp")
    axis.barrier()
    if axis.rank == 1:
        os._exit(7)
    began = time.monotonic()
    with pytest.raises(RankFailed, match=rf"{op} on axis dp .*\[0, 1, 2\]") as caught:
        while True:  # Gloo may finish one more before it notices
            tensor = torch.ones(50_000)
            full = torch.ones(150_000)
            if op == "all_reduce":
                axis.all_reduce(tensor).wait()
            elif op == "all_gather":
                axis.all_gather(full, tensor).wait()
            else:
                axis.receive(tensor, 1).wait()
    world.close(together=False)
    return time.monotonic() - began, str(caught.value)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "receive"])
@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_a_dead_rank_is_noticed(ranks, backend, op):
    replies = ranks(3, _die, op, backend=backend, may_die={1})
    assert replies[1] is None
    for rank in (0, 2):
        seconds, message = replies[rank]
        assert seconds < 20  # far below the time limit of the group
        assert backend != "shared" or (
            "coordinate 1 of the axis" in message and "is dead" in message
        )


def _leave(world):
    axis = world.axis("dp")
    if axis.rank == 1:
        world.close(together=False)
        return ""
    with pytest.raises(RankFailed) as caught:
        axis.barrier()
    world.close(together=False)
    return str(caught.value)


def test_a_rank_that_left_is_noticed(ranks):
    assert "coordinate 1 of the axis" in ranks(2, _leave, backend="shared")[0]
    assert "has left" in ranks(2, _leave, backend="shared")[0]


def _be_silent(world):
    axis = world.axis("dp")
    if axis.rank == 1:
        time.sleep(3)
        world.close(together=False)
        return ""
    with pytest.raises(RankFailed) as caught:
        axis.barrier()
    world.close(together=False)
    return str(caught.value)


def test_silence_has_a_limit(ranks):
    assert "silent for 1 s" in ranks(2, _be_silent, backend="shared", group_timeout_seconds=1.0)[0]


def _mismatch(world):
    axis = world.axis("dp")
    with pytest.raises(RunError, match="called different operations") as caught:
        if axis.rank == 0:
            axis.all_reduce(torch.ones(4)).wait()
        else:
            axis.all_gather(torch.ones(8), torch.ones(4)).wait()
    world.close(together=False)
    return str(caught.value)


def test_different_operations_are_named(ranks):
    message = ranks(2, _mismatch, backend="shared")[0]
    assert "all_reduce of 4 float32" in message
    assert "all_gather of 4 float32" in message


def test_a_simulated_rank_that_raises_ends_the_others():
    def run(world):
        if world.rank == 2:
            raise ValueError("this one")
        world.axis("dp").barrier()

    with pytest.raises(ValueError, match="this one"):
        threaded(4, run)


class _LateStore(dist.Store):
    """Tells this rank late where the others are."""

    def __init__(self, inner):
        super().__init__()
        self._inner = inner

    def get(self, key):
        found = self._inner.get(key)
        time.sleep(0.1)
        return found

    def set(self, key, value):
        self._inner.set(key, value)

    def wait(self, *args):
        self._inner.wait(*args)

    def add(self, key, value):
        return self._inner.add(key, value)

    def check(self, keys):
        return self._inner.check(keys)


def _join_and_leave(world, path, late):
    rank = world.rank
    size = world.size
    world.close()
    store = dist.FileStore(path, size)
    init(Mesh(dp=size), rank=rank, store=_LateStore(store) if rank == late else store).close()


@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_leaves_at_once_leaves_no_one_behind(ranks, tmp_path: Path, late):
    """Who joins last finds the others, though they used no axis and closed."""
    ranks(3, _join_and_leave, str(tmp_path / "store"), late)
