"""Dispatch and combine are inverses, send exactly the rows that move, and pass gradients back the way they came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.expert import ExpertExchange
from plait.mesh import Mesh
from tests.helpers.threaded import threaded

D = 3

# rows of each rank by expert: all kinds of emptiness
CASES = {
    "even": [[2, 2, 2, 2]] * 4,
    "one expert gets everything": [[0, 0, 5, 0]] * 4,
    "one rank has nothing": [[3, 1, 0, 2], [0, 0, 0, 0], [1, 0, 4, 0], [0, 2, 0, 0]],
    "nobody has anything": [[0, 0, 0, 0]] * 4,
    "fewer tokens than experts": [[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]],
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str, size: int) -> None:
    counts = CASES[case]

    def rank(world: Any) -> tuple[int, int]:
        axis, own = world.axis("ep"), torch.tensor(counts[world.rank])
        experts = torch.arange(4).repeat_interleave(own)
        rows = torch.stack(
            [experts.double(), torch.full_like(experts, world.rank).double(), torch.rand(len(experts)).double()], 1
        )
        rows = rows.requires_grad_()
        trip = ExpertExchange(axis).dispatch(rows, own)
        here, number = trip.arrive()
        each = 4 // size
        mine = range(axis.rank * each, (axis.rank + 1) * each)
        assert number == [sum(counts[r][e] for r in range(size)) for e in mine]
        assert here[:, 0].tolist() == [e for e, n in zip(mine, number, strict=True) for _ in range(n)]
        back = trip.combine(here * 2)
        assert torch.equal(back, rows * 2)
        (back * back).sum().backward()
        assert rows.grad is not None and torch.equal(rows.grad, 8 * rows)
        sent = sum(n for e, n in enumerate(counts[world.rank]) if e not in mine)
        received = sum(number) - sum(counts[world.rank][e] for e in mine)
        # counts once; rows forth by their owner and back by their host, and again for the gradients
        expected = (4 - each) * 8 + (2 * sent + 2 * received) * D * 8
        assert world.ledger.bytes("ep") == (expected if size > 1 else 0)
        return sent, received

    moved = threaded(size, rank, plan=Mesh(dp=size, ep=size))
    assert sum(sent for sent, _ in moved) == sum(received for _, received in moved)
