"""The pool itself: it runs ranks, reports a failing rank, recovers."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.pool import RanksFailed


def _sum(world, value):
    tensor = torch.full((4,), float(world.rank + value))
    world.axis("dp").all_reduce(tensor).wait()
    return tensor


def _fail_on_one(world):
    if world.rank == 1:
        raise ValueError("boom")
    world.axis("dp").barrier()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_runs_ranks(ranks, n):
    results = ranks(n, _sum, 1.0)
    assert [r.tolist() for r in results] == [[n * (n + 1) / 2] * 4] * n


def test_a_failing_rank_is_reported_and_the_pool_recovers(ranks):
    with pytest.raises(RanksFailed, match="boom"):
        ranks(2, _fail_on_one)
    test_runs_ranks(ranks, 2)
