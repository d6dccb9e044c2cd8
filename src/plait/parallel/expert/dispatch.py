"""Dispatch and combine: rows go to the ranks that hold their experts, and come back.

Lepikhin et al., "GShard" (2020), section 3.2, without padding: the all-to-all has uneven splits, so
nothing is sent that is not there and nothing is dropped because a buffer is full. Rows leave sorted
by expert, hence by rank; they arrive sorted by sender and are sorted by expert, once, on the way
into the grouped product. Sent by a rank: each way the rows whose expert is elsewhere, forward and
backward, and forward the counts of all experts.

    rank 0: e0 e0 e1 e3          -> rank 0 (e0 e1): e0 e0 e1 | e1          -> e0 e0 e1 e1 ->
    computed -> back
    rank 1: e1 e2 e2 e3          -> rank 1 (e2 e3): e3 | e2 e2 e3          -> e2 e2 e3 e3

Where experts have been placed anew (`place`), the rows of an expert are shared by its copies, and
leave sorted by slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm import Axis
from plait.models.experts import Exchange, Trip
from plait.models.permute import inverse, permute
from plait.parallel.expert.journey import Journey, Roads, journey
from plait.parallel.expert.placement import Layout


class ExpertExchange(Exchange):
    """Experts in equal, contiguous parts over the expert axis, unless `place` has said
    otherwise.
    """

    def __init__(self, roads: Roads | Axis) -> None:
        self.roads = Roads(roads) if isinstance(roads, Axis) else roads
        self.layout: Layout | None = None

    def place(self, layout: Layout | None) -> None:
        """Where experts are computed from now on; alike on every rank of the axis."""
        self.layout = layout

    def dispatch(self, rows: Tensor, counts: Tensor) -> Trip:
        """Tell every rank what comes, and let the rows depart."""
        size = self.roads.whole.size
        order = None
        leaving = counts.to(torch.int64)
        if self.layout is not None:
            leaving, order = _by_slot(leaving, self.layout, self.roads.whole.rank)
            rows = permute(rows, order)
        return _RankTrip(rows, journey(self.roads, leaving.view(size, -1)), order)


class _RankTrip(Trip):
    """`order`: how rows were put by slot before they left, if they were."""

    def __init__(self, rows: Tensor, on_its_way: Journey, order: Tensor | None) -> None:
        self._journey = on_its_way
        self._order = order
        self._waiting = on_its_way.depart(rows)

    def arrive(self) -> tuple[Tensor, list[int]]:
        rows = self._journey.arrive(self._waiting)
        arriving = self._journey.arriving
        experts = torch.arange(arriving.shape[1], device=rows.device).repeat(arriving.shape[0])
        order = experts.repeat_interleave(arriving.reshape(-1)).argsort(stable=True)
        self._sorted, self._back = order, inverse(order)
        return permute(rows, order, self._back), arriving.sum(0).tolist()

    def combine(self, rows: Tensor) -> Tensor:
        home = self._journey.home(permute(rows, self._back, self._sorted))
        return home if self._order is None else permute(home, inverse(self._order), self._order)


def _by_slot(counts: Tensor, layout: Layout, rank: int) -> tuple[Tensor, Tensor]:
    """(rows for each slot [slots], the order that puts rows sorted by expert in the order of
    slots).

    Copies of an expert take equal parts of its rows. Which of them takes one more differs from rank
    to rank.
    """
    slots = [slot for ranks in layout.experts for slot in ranks]
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(slots):
        holders.setdefault(expert, []).append(slot)
    shares = [0] * len(slots)
    blocks: list[int] = []  # the slots in the order in which the rows lie
    for expert, count in enumerate(counts.tolist()):
        copies = holders[expert]
        for index, slot in enumerate(copies):
            shares[slot] = (count + (index + rank) % len(copies)) // len(copies)
            blocks.append(slot)
    lengths = torch.tensor([shares[slot] for slot in blocks], device=counts.device)
    order = (
        torch.tensor(blocks, device=counts.device).repeat_interleave(lengths).argsort(stable=True)
    )
    return torch.tensor(shares, device=counts.device), order
