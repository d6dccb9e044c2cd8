"""What is counted is what the formulae say, on every backend alike; and the timeline sees every
operation.
"""

from __future__ import annotations

import pytest
import torch

from plait.comm import bytes_sent, wait_all
from plait.comm.ledger import CONTROL, Count
from plait.errors import PlanError, WorldSizeError
from plait.mesh import Mesh
from plait.trace import Timeline
from tests.helpers.threaded import threaded


def _all_operations(world):
    axis = world.axis("dp")
    rank = world.rank
    n = world.size
    full = torch.ones(n * 10)
    part = torch.ones(10)
    works = [
        axis.all_reduce(full),
        axis.reduce_scatter(part, torch.ones(n * 10)),
        axis.all_gather(full.clone(), part),
        axis.all_to_all(torch.empty(n, 3), torch.ones(n, 3)),
        axis.broadcast(part, 0),
        axis.reduce(part, 0),
        axis.shift(torch.empty(7), torch.ones(7)),
        axis.all_reduce(torch.ones(2, dtype=torch.float64), control=True),
        axis.all_reduce(torch.ones(n * 10), padding=n * 2),
    ]
    splits = [[(r + c) % 3 for c in range(n)] for r in range(n)]
    mine = splits[rank]
    theirs = [row[rank] for row in splits]
    works.append(
        axis.all_to_all(torch.empty(sum(theirs), 5), torch.ones(sum(mine), 5), theirs, mine)
    )
    wait_all(works)
    uneven = (sum(mine) - mine[rank]) * 5 * 4
    expected = {
        ("dp", "all_reduce"): Count(
            2,
            bytes_sent("all_reduce", n * 40, n) + bytes_sent("all_reduce", n * 32, n),
            bytes_sent("all_reduce", n * 40, n) - bytes_sent("all_reduce", n * 32, n),
        ),
        ("dp", "reduce_scatter"): Count(1, bytes_sent("reduce_scatter", n * 40, n)),
        ("dp", "all_gather"): Count(1, bytes_sent("all_gather", n * 40, n)),
        ("dp", "all_to_all"): Count(2, bytes_sent("all_to_all", n * 12, n) + uneven),
        ("dp", "broadcast"): Count(1, bytes_sent("broadcast", 40, n)),
        ("dp", "reduce"): Count(1, bytes_sent("reduce", 40, n)),
        ("dp", "shift"): Count(1, 28),
        ("dp", CONTROL): Count(1, bytes_sent("all_reduce", 16, n)),
    }
    assert world.ledger.counts == (expected if n > 1 else {})


@pytest.mark.parametrize("backend", ["native", "gloo", "shared"])
def test_counts_equal_the_formulae(ranks, backend):
    for n in (1, 2, 4):
        ranks(n, _all_operations, backend=backend)


@pytest.mark.parametrize("n", [1, 3, 7])
def test_counts_on_simulated_ranks(n):
    threaded(n, _all_operations)


def test_the_timeline_records_what_happens_after_it_is_set():
    def run(world):
        axis = world.axis("dp")
        axis.all_reduce(torch.ones(4)).wait()
        world.begin_timeline(Timeline(world.rank))
        work = axis.all_gather(torch.empty(8), torch.ones(4))
        work.wait()
        work.wait()
        (event,) = world.timeline.comms
        assert (event.axis, event.op, event.bytes, event.rank) == (
            "dp",
            "all_gather",
            16,
            world.rank,
        )
        assert 0 <= event.exposed_seconds <= event.seconds

    threaded(2, run)


def test_axes_of_a_mesh():
    def run(world):
        value = torch.tensor([float(world.rank)])
        sums = {}
        for name in ("pp", "dp", "tp", "tp_row", "tp_col", ("dp", "tp"), "world"):
            axis = world.axis(name)
            assert axis is world.axis(name)
            assert axis.ranks[axis.rank] == world.rank
            total = value.clone()
            axis.all_reduce(total).wait()
            assert total.item() == sum(axis.ranks)
            sums[axis.name] = axis.size
        return sums

    mesh = Mesh(pp=2, dp=2, tp=4, tp_parts=(("tp_row", 2), ("tp_col", 2)))
    assert threaded(16, run, plan=mesh)[5] == {
        "pp": 2,
        "dp": 2,
        "tp": 4,
        "tp_row": 2,
        "tp_col": 2,
        "dp*tp": 8,
        "world": 16,
    }


def _axes_on_real_ranks(world):
    for name in ("dp", "tp", ("dp", "tp"), "world"):
        axis = world.axis(name)
        total = torch.tensor([float(world.rank)])
        axis.all_reduce(total).wait()
        assert total.item() == sum(axis.ranks)
        assert axis.gather_objects({"rank": world.rank}) == [{"rank": rank} for rank in axis.ranks]


@pytest.mark.parametrize("backend", ["native", "gloo", "shared"])
def test_axes_of_a_mesh_on_real_ranks(ranks, backend):
    ranks(4, _axes_on_real_ranks, plan=Mesh(dp=2, tp=2), backend=backend)


def _refusals(world):
    axis = world.axis("dp")
    with pytest.raises(PlanError, match="not contiguous"):
        axis.all_reduce(torch.ones(4, 4).T)
    with pytest.raises(PlanError, match="full must be 2 x part"):
        axis.reduce_scatter(torch.ones(4), torch.ones(9))
    with pytest.raises(PlanError, match="coordinate 2 is no peer of coordinate"):
        axis.broadcast(torch.ones(4), 2)
    with pytest.raises(PlanError, match="is no peer"):
        axis.send(torch.ones(4), axis.rank)
    with pytest.raises(PlanError, match="3 source rows do not divide by 2"):
        axis.all_to_all(torch.ones(3), torch.ones(3))
    with pytest.raises(PlanError, match="must be 2 counts that sum to 3 rows"):
        axis.all_to_all(torch.ones(3), torch.ones(3), [1, 2], [2, 2])
    with pytest.raises(PlanError, match="not in mesh order"):
        world.axis(("tp", "dp"))


def test_mistakes_are_refused_before_anything_is_sent():
    threaded(4, _refusals, plan=Mesh(dp=2, tp=2))


def _wrong_mesh(world):
    from plait.comm import init

    with pytest.raises(WorldSizeError, match="needs 3 ranks and the world has 2"):
        init(Mesh(dp=3))
    with pytest.raises(PlanError, match="did you mean 'shared'"):
        init(Mesh(dp=2), backend="shard")


def test_a_world_of_another_size_is_refused(ranks):
    ranks(2, _wrong_mesh)


def test_tensors_with_a_graph_are_communicated_as_values():
    def run(world):
        weight = torch.nn.Parameter(torch.full((3,), float(world.rank)))
        world.axis("dp").broadcast(weight, 1).wait()
        assert weight.tolist() == [1.0] * 3

    threaded(2, run)
