"""The cuts and moves of tensor modes: axes as the mesh has them, and one element on one rank."""

from __future__ import annotations

import pytest

from plait.comm.transitions import backward, operation
from plait.mesh import Mesh
from plait.mesh.tensor_layout import tensor_layout
from plait.plan import Plan

PLANS = ("tp4", "tp4:1d,sp", "tp9:2d", "tp12:2.5d,depth3", "tp27:3d")


@pytest.mark.parametrize("text", PLANS)
def test_a_line_of_axes_is_the_line_of_the_mesh(text: str) -> None:
    plan = Plan.parse(text)
    mesh = Mesh.of(plan)
    layout = tensor_layout(plan.tp)
    for name, size in layout.parts:
        ranks = mesh.line(0, name)
        assert layout.line((name,)) == (size, ranks[1] - ranks[0])
    samples = layout.residual.different
    if samples:
        ranks = mesh.line(0, samples)
        assert layout.line(samples) == (len(ranks), ranks[1] - ranks[0])


@pytest.mark.parametrize("text", PLANS)
def test_a_weight_is_on_every_rank_once_but_for_its_copies(text: str) -> None:
    plan = Plan.parse(text)
    layout = tensor_layout(plan.tp)
    for linear in layout.linear.values():
        copies = layout.size(linear.partial)
        assert layout.size(linear.out + linear.into) * copies == plan.tp.size


@pytest.mark.parametrize("text", PLANS)
def test_a_gathered_operand_is_scattered_in_its_gradient(text: str) -> None:
    layout = tensor_layout(Plan.parse(text).tp)
    for linear in layout.linear.values():
        for move in (linear.x, linear.weight, linear.y):
            if move is not None and operation(move.source, move.target) == "all_gather":
                assert operation(*backward(move.source, move.target)) == "reduce_scatter"
