"""Every operation of an axis on every backend, in every kind of memory, against sums computed in
one process.
"""

from __future__ import annotations

import random

import pytest

from plait.paths import Paths
from tests.comm import cases
from tests.helpers.threaded import threaded

WAYS = (
    "gloo_all_gather_bytes",
    "gloo_all_reduce_bytes",
    "gloo_direct_bytes",
    "gloo_direct_parts",
    "gloo_exchange_bytes",
    "gloo_reduce_scatter_bytes",
)
BACKENDS = ("native", "gloo", "shared")


def _each(world, numel):
    axis = world.axis("dp")
    chance = random.Random(numel)
    for dtype in cases.DTYPES:
        for op in cases.OPS:
            for memory in ("plain", "empty", "alias"):
                case = cases.make(op, world.size, numel, dtype, chance)
                work, result = cases.start(case, axis, memory)
                work.wait()
                work.wait()  # the second returns at once
                cases.check(case, axis.rank, result)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_operation(ranks, n, backend):
    for numel in (0, 1, 5, 60_000):
        ranks(n, _each, numel, backend=backend)


def _by_the_ways_of_large_tensors(world, numel):
    world.axis("dp")._backend.follow(Paths(dict.fromkeys(WAYS, 0)))
    _each(world, numel)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_operation_of_gloo_by_the_ways_of_large_tensors(ranks, n):
    ranks(n, _by_the_ways_of_large_tensors, 5, backend="gloo")


def _between_machines(world, is_local):
    backend = world.axis("dp")._backend
    backend._is_local = is_local
    _each(world, 70_000)


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("n", [2, 3])
def test_each_operation_of_gloo_on_one_machine_and_between_several(ranks, n, is_local):
    ranks(n, _between_machines, is_local, backend="gloo")


@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("n", [2, 4])
def test_random_sequences_in_any_order_of_waits(ranks, n, backend):
    for seed in range(3):
        ranks(n, cases.run_random, seed, 50, 50_000, backend=backend)


@pytest.mark.parametrize(("n", "largest"), [(2, 40_000), (5, 20_000), (16, 300)])
def test_each_operation_on_simulated_ranks(n, largest):
    for numel in (0, 1, 5, largest):
        threaded(n, _each, numel)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_random_sequences_on_simulated_ranks(n):
    for seed in range(4):
        threaded(n, cases.run_random, seed, 50, 40_000, 0.001)
