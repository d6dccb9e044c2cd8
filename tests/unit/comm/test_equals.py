"""The ranks with which a slow one is compared: they do as much of the same work."""

from __future__ import annotations

import pytest

from plait.comm.simulated import simulate
from plait.mesh import Mesh
from plait.plan import Plan


@pytest.mark.parametrize(
    ("plan", "shares", "expected"),
    [
        ("dp3", (), [(0, 1, 2)] * 3),
        ("dp3", (3, 1, 3), [(0, 2), (1,), (0, 2)]),
        ("tp2 dp2", (3, 1), [(0,), (1,), (2,), (3,)]),
        ("tp2 dp2", (1, 1), [(0, 2), (1, 3), (0, 2), (1, 3)]),
    ],
)
def test_equals_have_equal_shares(
    plan: str, shares: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    mesh = Mesh.of(Plan.parse(plan))
    assert simulate(mesh, lambda world: world.equal_ranks(shares)) == expected
