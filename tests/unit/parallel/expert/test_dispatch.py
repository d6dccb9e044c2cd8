"""Dispatch and combine are inverses, send exactly the rows that move, and pass gradients back the
way they came.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.mesh import Mesh
from plait.parallel.expert import AllToAllGroups, ExpertExchange, ExpertPlacement
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
        axis = world.axis("ep")
        own = torch.tensor(counts[world.rank])
        experts = torch.arange(4).repeat_interleave(own)
        rows = torch.stack(
            [
                experts.double(),
                torch.full_like(experts, world.rank).double(),
                torch.rand(len(experts)).double(),
            ],
            1,
        )
        rows = rows.requires_grad_()
        handle = ExpertExchange(axis).dispatch(rows, own)
        here, number = handle.wait()
        each = 4 // size
        mine = range(axis.rank * each, (axis.rank + 1) * each)
        assert number == [sum(counts[r][e] for r in range(size)) for e in mine]
        assert here[:, 0].tolist() == [
            e for e, n in zip(mine, number, strict=True) for _ in range(n)
        ]
        back = handle.combine(here * 2)
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


LAYOUTS = {
    "at home": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "moved": ((6, 3), (0, 1), (7, 2), (5, 4)),
    "copies of the hot one": ((0, 1, 2), (3, 2, 4), (5, 2, 6), (7, 2, 0)),
    "twice on one rank": ((0, 1, 2), (3, 3, 4), (5, 2, 6), (7, 2, 0)),
}


@pytest.mark.parametrize("by_node", [False, True])
@pytest.mark.parametrize("placement", LAYOUTS)
def test_there_and_back_between_nodes_and_by_slot(placement: str, by_node: bool) -> None:
    """Four ranks, two a node: the same rows wait in the same order by one hop and by two."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 5, (4, 8), generator=generator)
    counts[1] = 0
    counts[:, 2] += 7
    slots = LAYOUTS[placement]
    copies = [sum(slot == e for rank in slots for slot in rank) for e in range(8)]

    def rank(world: Any) -> tuple[list[int], dict[str, int]]:
        axis = world.axis("ep")
        own = counts[world.rank]
        experts = torch.arange(8).repeat_interleave(own)
        rows = torch.stack(
            [experts.double(), torch.rand(len(experts), dtype=torch.float64)], 1
        ).requires_grad_()
        groups = (
            AllToAllGroups(axis, world.axis("ep_local"), world.axis("ep_nodes"))
            if by_node
            else AllToAllGroups(axis)
        )
        exchange = ExpertExchange(groups)
        exchange.place(None if placement == "at home" else ExpertPlacement(slots))
        handle = exchange.dispatch(rows, own)
        here, number = handle.wait()
        assert here[:, 0].tolist() == [
            e for e, n in zip(slots[world.rank], number, strict=True) for _ in range(n)
        ]
        back = handle.combine(here * 2)
        assert torch.equal(back, rows * 2)
        (back * back).sum().backward()
        assert rows.grad is not None and torch.equal(rows.grad, 8 * rows)
        return number, {name: world.ledger.bytes(name) for name in ("ep", "ep_local", "ep_nodes")}

    found = threaded(4, rank, plan=Mesh(dp=4, ep=4, node=2))
    taken = [0.0] * 8
    for held, (number, _) in zip(slots, found, strict=True):
        for expert, n in zip(held, number, strict=True):
            taken[expert] += n
            assert (
                abs(n - float(counts[:, expert].sum()) / copies[expert]) <= 4
            )  # each of 4 ranks rounds once
    assert taken == counts.sum(0).tolist()
    for _, sent in found:
        assert (sent["ep"] == 0) == by_node and (sent["ep_nodes"] > 0) == by_node


def test_two_hops_send_what_the_formula_says() -> None:
    """Inside: rows for another place in a node; across: rows met for another node. Twice each way,
    and the counts.
    """
    counts = torch.randint(0, 5, (4, 8), generator=torch.Generator().manual_seed(1))
    to_rank = counts.view(4, 4, 2).sum(-1)  # [from, to]

    def rank(world: Any) -> tuple[int, int]:
        groups = AllToAllGroups(world.axis("ep"), world.axis("ep_local"), world.axis("ep_nodes"))
        own = counts[world.rank]
        rows = torch.rand(int(own.sum()), D, dtype=torch.float64, requires_grad=True)
        handle = ExpertExchange(groups).dispatch(rows, own)
        handle.combine(handle.wait()[0]).sum().backward()
        return world.ledger.bytes("ep_local"), world.ledger.bytes("ep_nodes")

    for me, (inside, across) in enumerate(threaded(4, rank, plan=Mesh(dp=4, ep=4, node=2))):
        node, place = divmod(me, 2)
        neighbour = node * 2 + 1 - place
        for_neighbour = [other for other in range(4) if other % 2 != place]
        for_me = [other for other in range(4) if other % 2 == place]
        out = sum(int(to_rank[me, other]) for other in for_neighbour)
        came = sum(int(to_rank[neighbour, other]) for other in for_me)
        far = for_me[1 - node]
        on = int(to_rank[me, far] + to_rank[neighbour, far])
        arrived = sum(int(to_rank[far // 2 * 2 + neighbour, me]) for neighbour in range(2))
        numbers = 4 * 8  # bytes of the counts of two ranks' two experts
        assert inside == numbers + 2 * (out + came) * D * 8
        assert across == numbers + 2 * (on + arrived) * D * 8
