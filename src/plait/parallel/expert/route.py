"""The travel of rows between ranks and back: in one hop, or in two where ranks are on several
nodes.

Two hops, inside the node first (Rajbhandari et al., "DeepSpeed-MoE" (2022), section 5.2). Rank l of
a node gathers from its neighbours the rows for any node's rank l, and sends them on. Each rank then
speaks to one rank of every other node instead of all. Messages are as many times larger as a node
has ranks. In both cases rows leave sorted by receiving rank and wait sorted by sending rank. With N
nodes of L ranks, and blocks of rows named by the coordinate that varies:

    sent    [N to, L to]   -> [L to, N to]   -- inside --> [L from, N to]
            [L from, N to] -> [N to, L from] -- across --> [N from, L from]

Shapes: n counts a rank and destination (one for each expert there), R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Axis
from plait.comm.uneven import UnevenAllToAll
from plait.models.permute import inverse, permute


@dataclass(frozen=True)
class AllToAllGroups:
    """The expert axis, and where it spans nodes its parts inside a node and across."""

    whole: Axis
    inside: Axis | None = None
    across: Axis | None = None


class AllToAllRoute(ABC):
    """Rows [R, ...] under way.

    Attributes:
        received: [ranks, n], how many come from each rank for each expert here.
        rows_by_expert: their sums over the ranks, on the host.
    """

    received: Tensor
    rows_by_expert: list[int]

    @abstractmethod
    def start(self, rows: Tensor) -> Tensor:
        """Let rows [R, ...] start; the result may only be given to `wait`. Collective, as are
        `wait` and `undo`.
        """

    @abstractmethod
    def wait(self, waiting: Tensor) -> Tensor:
        """The rows [rows here, ...] that have come, `received.sum()` of them, sorted by the rank
        that sent them.
        """

    @abstractmethod
    def undo(self, rows: Tensor) -> Tensor:
        """Rows as they arrived [rows here, ...] -> rows as they were sent [R, ...]: the inverse of
        start and wait.
        """


def make_route(groups: AllToAllGroups, sent: Tensor) -> AllToAllRoute:
    """The route for `sent` [ranks, n] rows to each rank and expert there. Collective: the ranks
    tell each other these numbers.
    """
    if groups.inside is None or groups.across is None:
        return DirectRoute(groups.whole, sent)
    return HierarchicalRoute(groups.inside, groups.across, sent)


def _exchanged_counts(axis: Axis, counts: Tensor) -> Tensor:
    """The counts that other ranks have for this one: [ranks, ...] -> [ranks, ...]."""
    there = torch.empty_like(counts)
    axis.all_to_all(there, counts).wait()
    return there


def _read(received: Tensor, *exchanged: Tensor) -> tuple[list[int], ...]:
    """Rows for each expert here, then the rows by rank of each exchange; one read by the host."""
    parts = [received.sum(0), *(counts.flatten(1).sum(1) for counts in exchanged)]
    numbers: list[int] = torch.cat(parts).tolist()
    found = []
    for part in parts:
        found.append(numbers[: part.numel()])
        numbers = numbers[part.numel() :]
    return tuple(found)


class DirectRoute(AllToAllRoute):
    """A route of one all-to-all, with uneven parts, between all ranks of the expert axis."""

    def __init__(self, axis: Axis, sent: Tensor) -> None:
        sent = sent.contiguous()
        self.received = _exchanged_counts(axis, sent)
        self.rows_by_expert, *sizes = _read(self.received, sent, self.received)
        self._exchange = UnevenAllToAll(axis, *sizes)

    def start(self, rows: Tensor) -> Tensor:
        return self._exchange.start(rows)

    def wait(self, waiting: Tensor) -> Tensor:
        return self._exchange.wait(waiting)

    def undo(self, rows: Tensor) -> Tensor:
        back = self._exchange.inverse()
        return back.wait(back.start(rows))


class HierarchicalRoute(AllToAllRoute):
    """A route of two all-to-alls: in the node, then between ranks of equal place in their nodes."""

    def __init__(self, inside: Axis, across: Axis, sent: Tensor) -> None:
        counts = sent.view(across.size, inside.size, -1)
        out = counts.transpose(0, 1).contiguous()  # [L to, N to, n]
        met = _exchanged_counts(inside, out)  # [L from, N to, n]
        on = met.transpose(0, 1).contiguous()  # [N to, L from, n]
        there = _exchanged_counts(across, on)  # [N from, L from, n]
        self.received = there.view(sent.shape)
        sizes = _read(self.received, out, met, on, there)
        self.rows_by_expert = sizes[0]
        self._first = UnevenAllToAll(inside, *sizes[1:3])
        self._second = UnevenAllToAll(across, *sizes[3:])
        self._pack = _swap_blocks(counts.sum(-1), sum(sizes[1]))
        self._turn = _swap_blocks(met.sum(-1), sum(sizes[2]))

    def start(self, rows: Tensor) -> Tensor:
        return self._first.start(permute(rows, self._pack))

    def wait(self, waiting: Tensor) -> Tensor:
        met = self._first.wait(waiting)
        return self._second.wait(self._second.start(permute(met, self._turn)))

    def undo(self, rows: Tensor) -> Tensor:
        for exchange, order in ((self._second, self._turn), (self._first, self._pack)):
            back = exchange.inverse()
            rows = permute(back.wait(back.start(rows)), inverse(order), order)
        return rows


def _swap_blocks(counts: Tensor, num_rows: int) -> Tensor:
    """Blocks of rows laid out [A, B], of these lengths: the order that lays them out [B, A]."""
    a, b = counts.shape
    place = torch.arange(a * b, device=counts.device).view(b, a).t().reshape(-1)
    blocks = place.repeat_interleave(counts.reshape(-1), output_size=num_rows)
    return blocks.argsort(stable=True)
