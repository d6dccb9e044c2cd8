"""Coordinates and lines: laws on many meshes, and the orders that the tensor modes rely on."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from plait.errors import PlanError
from plait.mesh import Mesh

MESHES = [
    Mesh(),
    Mesh(dp=4),
    Mesh(pp=2, dp=6, cp=2, tp=4, ep=3, dp_replicate=3, tp_parts=(("tp_row", 2), ("tp_col", 2))),
    Mesh(dp=2, cp=3, ep=2),
    Mesh(pp=2, dp=4, tp=2, ep=4, node=4),
    Mesh(tp=8, tp_parts=(("tp_i", 2), ("tp_j", 2), ("tp_l", 2))),
    Mesh(pp=3, tp=8, tp_parts=(("tp_depth", 2), ("tp_row", 2), ("tp_col", 2))),
]


@pytest.mark.parametrize("mesh", MESHES)
def test_lines_of_an_axis_cut_the_world_into_equal_parts(mesh):
    for name in mesh.names:
        lines = mesh.lines(name)
        assert sorted(itertools.chain(*lines)) == list(mesh)
        assert {len(line) for line in lines} == {mesh.axis_size(name)}
        for rank in mesh:
            line = mesh.line(rank, name)
            assert line in lines
            assert line[mesh.coordinate(rank, name)] == rank
            assert list(line) == sorted(line)


@pytest.mark.parametrize("mesh", MESHES)
def test_products_of_parts_are_the_whole(mesh):
    products = {
        "world": ("pp", "dp", "cp", "tp"),
        "dp": ("dp_replicate", "dp_shard"),
        "tp": tuple(name for name, _ in mesh.tp_parts) or ("tp",),
    }
    for whole, parts in products.items():
        for rank in mesh:
            assert mesh.line(rank, parts) == mesh.line(rank, whole)
    for rank in mesh:
        assert sorted(mesh.line(rank, ("edp", "ep"))) == list(mesh.line(rank, ("dp", "cp")))


@pytest.mark.parametrize("mesh", MESHES)
def test_coordinates_name_each_rank_once(mesh):
    assert [mesh.rank_at(**mesh.coordinates(rank)) for rank in mesh] == list(mesh)


def test_the_tensor_axis_is_innermost_and_the_pipeline_outermost():
    mesh = Mesh(pp=2, dp=2, cp=2, tp=2)
    assert mesh.line(0, "tp") == (0, 1)
    assert mesh.line(0, "cp") == (0, 2)
    assert mesh.line(0, "dp") == (0, 4)
    assert mesh.line(0, "pp") == (0, 8)


def test_the_row_coordinate_varies_along_a_column_of_the_grid():
    mesh = Mesh(tp=4, tp_parts=(("tp_row", 2), ("tp_col", 2)))
    assert mesh.line(1, "tp_row") == (1, 3)
    assert mesh.line(1, "tp_col") == (0, 1)


def test_experts_borrow_the_inner_part_of_dp_x_cp():
    mesh = Mesh(dp=4, cp=2, tp=2, ep=4)
    assert mesh.line(0, ("dp", "cp")) == (0, 2, 4, 6, 8, 10, 12, 14)
    assert mesh.line(10, "ep") == (8, 10, 12, 14)
    assert mesh.line(10, "edp") == (2, 10)


def test_mesh_of_a_plan():
    def plan(mode, size, q, depth=1):
        tp = SimpleNamespace(size=size, mode=mode, q=q, depth=depth)
        dp = SimpleNamespace(size=4, replicate=2)
        one = SimpleNamespace(size=1)
        return SimpleNamespace(pp=one, dp=dp, cp=one, tp=tp, ep=2)

    assert Mesh.of(plan("1d", 3, 3)) == Mesh(dp=4, tp=3, ep=2, dp_replicate=2)
    assert Mesh.of(plan("2d", 4, 2)).tp_parts == (("tp_row", 2), ("tp_col", 2))
    assert Mesh.of(plan("2.5d", 12, 2, 3)).tp_parts == (
        ("tp_depth", 3),
        ("tp_row", 2),
        ("tp_col", 2),
    )
    assert Mesh.of(plan("3d", 8, 2)).tp_parts == (("tp_i", 2), ("tp_j", 2), ("tp_l", 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(dp=0), "size of axis dp is 0"),
        (lambda: Mesh(dp=4, dp_replicate=3), "replicate must divide 4"),
        (lambda: Mesh(dp=4, ep=3), "ep3 must divide dp x cp = 4"),
        (lambda: Mesh(tp=4, tp_parts=(("tp_row", 2),)), "do not multiply to tp4"),
        (lambda: Mesh(dp=2).line(2, "dp"), "rank 2 is outside the mesh of 2 ranks"),
        (lambda: Mesh(dp=2).line(0, "dp_shards"), "did you mean 'dp_shard'"),
        (lambda: Mesh(dp=2).line(0, "tp_row"), "no axis 'tp_row' on this mesh"),
        (lambda: Mesh(dp=4, dp_replicate=2).line(0, ("dp", "dp_shard")), "overlap"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_mesh_and_the_tables_import_no_torch():
    code = (
        "import sys, plait.mesh, plait.trace, plait.comm.transitions, plait.comm.ledger; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_experts_span_nodes_where_a_line_has_several_ranks_of_several():
    spanning = Mesh(dp=8, ep=4, node=2)
    assert spanning.experts_span_nodes
    assert spanning.line(5, "ep") == (4, 5, 6, 7)
    assert spanning.line(5, "ep_local") == (4, 5) and spanning.line(5, "ep_nodes") == (5, 7)
    assert Mesh(dp=4, tp=2, ep=4, node=4).line(3, "ep_local") == (1, 3)
    for mesh in (
        Mesh(dp=8, ep=4),
        Mesh(dp=8, ep=4, node=4),
        Mesh(dp=8, ep=4, node=1),
        Mesh(dp=6, ep=6, node=4),
    ):
        assert not mesh.experts_span_nodes
