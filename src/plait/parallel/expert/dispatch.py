"""Dispatch and combine: rows go to the ranks that hold their experts, and come back.

Lepikhin et al., "GShard" (2020), section 3.2, without padding. The all-to-all has uneven splits, so
nothing is sent needlessly and nothing is dropped because a buffer is full. Rows leave sorted by
expert, hence by rank. They wait sorted by sender and are sorted by expert, once, on the way into
the grouped product. A rank sends, each way, the rows whose expert is elsewhere, forward and
backward. Forward it also sends the counts of all experts.

    sent                    received, by sender             by expert
    rank 0: e0 e0 e1 e3  -> rank 0 (e0 e1): e0 e0 e1 | e1 -> e0 e0 e1 e1 -> computed -> back
    rank 1: e1 e2 e2 e3  -> rank 1 (e2 e3): e3 | e2 e2 e3 -> e2 e2 e3 e3 -> computed -> back

Where experts have copies (`place`), the rows of an expert are shared by them. Rows then leave
sorted by slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm import Axis
from plait.models.experts import DispatchHandle, Exchange
from plait.models.permute import inverse, permute
from plait.parallel.expert.placement import ExpertPlacement
from plait.parallel.expert.route import AllToAllGroups, AllToAllRoute, make_route


class ExpertExchange(Exchange):
    """Experts in equal, contiguous parts over the expert axis, unless `place` has said
    otherwise.
    """

    def __init__(self, groups: AllToAllGroups | Axis) -> None:
        self.groups = AllToAllGroups(groups) if isinstance(groups, Axis) else groups
        self.placement: ExpertPlacement | None = None

    def place(self, placement: ExpertPlacement | None) -> None:
        """Set where experts are computed from now on; alike on every rank of the axis. None is at
        home.
        """
        self.placement = placement

    def dispatch(self, rows: Tensor, counts: Tensor) -> DispatchHandle:
        """Tell every rank what comes, and let the rows start. Collective.

        `rows` [R, D] are this rank's, sorted by expert; `counts` [experts, on all ranks] say how
        many each gets.
        """
        size = self.groups.whole.size
        order = None
        sent = counts.to(torch.int64)
        if self.placement is not None:
            sent, order = _by_slot(sent, self.placement, self.groups.whole.rank)
            rows = permute(rows, order)
        return _RankDispatch(rows, make_route(self.groups, sent.view(size, -1)), order)


class _RankDispatch(DispatchHandle):
    """`order`: how rows were put by slot before they left, if they were."""

    def __init__(self, rows: Tensor, on_its_way: AllToAllRoute, order: Tensor | None) -> None:
        self._route = on_its_way
        self._order = order
        self._waiting = on_its_way.start(rows)

    def wait(self) -> tuple[Tensor, list[int]]:
        rows = self._route.wait(self._waiting)
        received = self._route.received
        experts = torch.arange(received.shape[1], device=rows.device).repeat(received.shape[0])
        lengths = received.reshape(-1)
        order = experts.repeat_interleave(lengths, output_size=rows.shape[0]).argsort(stable=True)
        self._sorted = order
        self._back = inverse(order)
        return permute(rows, order, self._back), self._route.rows_by_expert

    def combine(self, rows: Tensor) -> Tensor:
        home = self._route.undo(permute(rows, self._back, self._sorted))
        return home if self._order is None else permute(home, inverse(self._order), self._order)


def _by_slot(counts: Tensor, placement: ExpertPlacement, rank: int) -> tuple[Tensor, Tensor]:
    """(rows for each slot [slots], the order that puts rows sorted by expert in the order of
    slots).

    Copies of an expert take equal parts of its rows. Which of them takes one more differs from rank
    to rank.
    """
    slots = [slot for ranks in placement.experts for slot in ranks]
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
