"""Axes over several hosts, stood for by ranks that take themselves for other hosts' ranks: the same
results as over Gloo, and on all ranks the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

import pytest
import torch

from plait import comm
from plait.comm.hosts import Hosts
from plait.comm.shm import processes
from plait.errors import RankFailed
from plait.mesh import Mesh
from plait.paths import Paths
from tests.comm import cases
from tests.comm.test_operations import _each
from tests.parity.harness import TOLERANCE, check

LARGE = {"hosts_bytes": 0}
EVEN = (2, 2)


@contextlib.contextmanager
def on_hosts(world, sizes):
    """Another world of these ranks, of which the first `sizes[0]` are on one host, and so on."""
    host = next(place for place in range(len(sizes)) if world.rank < sum(sizes[: place + 1]))
    own = processes.Identity.own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world.size))
        patch.setenv("LOCAL_WORLD_SIZE", str(sizes[host]))
        patch.setattr(
            processes.Identity,
            "own",
            staticmethod(lambda: dataclasses.replace(own(), host=f"host{host}")),
        )
        apart = comm.init(world.mesh, timeout_seconds=30.0)
        yield apart
        apart.close()


def _kinds(world, sizes, names):
    with on_hosts(world, sizes) as apart:
        return [type(apart.axis(name)._backend).__name__ for name in names]


def test_axes_over_equal_hosts_pass_through_their_memory(ranks):
    names = ("tp", "dp", "world")
    mesh = Mesh(dp=2, tp=2)
    assert ranks(4, _kinds, EVEN, names, plan=mesh) == [["Direct", "Gloo", "Hosts"]] * 4


@pytest.mark.parametrize("sizes", [(1, 3), (1, 1, 2), (1, 1, 1, 1)])
def test_unequal_hosts_and_hosts_of_one_rank_use_gloo(ranks, sizes):
    assert ranks(4, _kinds, sizes, ("dp",)) == [["Gloo"]] * 4


def _operations(world, sizes, numel):
    with on_hosts(world, sizes) as apart:
        axis = apart.axis("dp")
        assert isinstance(axis._backend, Hosts)
        axis._backend.follow(Paths(LARGE))
        _each(apart, numel)


@pytest.mark.parametrize(("n", "sizes"), [(4, EVEN), (6, (2, 2, 2)), (6, (3, 3))])
def test_each_operation(ranks, n, sizes):
    for numel in (0, 1, 6):
        ranks(n, _operations, sizes, numel)


def _large_operations(world):
    with on_hosts(world, EVEN) as apart:
        _each(apart, 300_000)
        return dict(apart.axis("dp")._backend.paths.taken())["hosts_bytes"]


def test_each_large_operation(ranks):
    assert ranks(4, _large_operations) == [(True,)] * 4


def _in_any_order(world, seed):
    with on_hosts(world, EVEN) as apart:
        apart.axis("world")._backend.follow(Paths(LARGE))
        cases.run_random(apart, seed, 40, 50_000)


def test_random_sequences_in_any_order_of_waits(ranks):
    for seed in range(3):
        ranks(4, _in_any_order, seed)


def _sums(world, dtype):
    """The sum by hosts, by Gloo, and by hand in the order that is stated."""
    own = torch.Generator().manual_seed(world.rank)
    numel = 4 * 40_000
    values = torch.randn(numel, generator=own, dtype=torch.float64).to(dtype)
    every = world.axis("dp").gather_objects(values)
    found = []
    with on_hosts(world, EVEN) as apart:
        before = apart.ledger.copy()
        whole = values.clone()
        apart.axis("dp").all_reduce(whole).wait()
        part = torch.empty(numel // 4, dtype=dtype)
        apart.axis("dp").reduce_scatter(part, values.clone()).wait()
        full = torch.empty(numel, dtype=dtype)
        apart.axis("dp").all_gather(full, part).wait()
        found.append(apart.ledger.since(before).counts)
    before = world.ledger.copy()
    flat = values.clone()
    world.axis("dp").all_reduce(flat).wait()
    world.axis("dp").reduce_scatter(torch.empty_like(part), values.clone()).wait()
    world.axis("dp").all_gather(torch.empty_like(full), part).wait()
    found.append(world.ledger.since(before).counts)
    by_hand = (every[0] + every[1]) + (every[2] + every[3])
    return whole, full, by_hand, flat, found


def test_sums_are_by_host_and_alike_on_all_ranks_and_counted_as_ever(ranks):
    for dtype in (torch.float32, torch.float64):
        for whole, full, by_hand, flat, (ours, theirs) in ranks(4, _sums, dtype):
            assert torch.equal(whole, by_hand)
            assert torch.equal(full, by_hand)
            torch.testing.assert_close(whole, flat, rtol=1e-6, atol=1e-5)
            assert ours == theirs


def _apart(world, act, arguments):
    """Act with ranks on two hosts, and check that large sums went by them."""
    with on_hosts(world, EVEN) as apart, apart.paths.limited(LARGE):
        found = act(apart, *arguments)
        assert True in apart.paths.taken()["hosts_bytes"]
        return found


@pytest.mark.parametrize("plan", ["dp4", "dp4:zero1 mb3", "dp4:zero2", "dp4:zero3 mb3"])
def test_training_over_hosts_equals_one_device(ranks, plan):
    def run(n, act, *arguments, plan):
        return ranks(n, _apart, act, arguments, plan=plan)

    outcome = check(run, f"{plan} precision:float64", "llama")
    assert outcome.largest <= TOLERANCE, outcome


def _lost(world):
    with on_hosts(world, EVEN) as apart:
        axis = apart.axis("dp")
        tensor = axis.empty(400_000, torch.float32, torch.device("cpu")).fill_(1.0)
        axis.all_reduce(tensor).wait()
        if world.rank == 3:
            os._exit(9)
        with pytest.raises(RankFailed, match="all_reduce on axis dp"):
            axis.all_reduce(tensor).wait()
        with pytest.raises(RankFailed, match="all_reduce on axis dp"):
            axis.all_reduce(tensor).wait()
        apart.close(together=False)


def test_a_lost_rank_is_told_of_on_every_host(ranks):
    ranks(4, _lost, may_die=(3,))
