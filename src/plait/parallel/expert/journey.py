"""How rows get from ranks to ranks and back: in one hop, or where the ranks are on several nodes in
two.

Two hops, inside the node first (Rajbhandari et al., "DeepSpeed-MoE" (2022), section 5.2): rank l of
a node gathers from its neighbours what goes to rank l of any node, and sends it on. Each rank then
speaks to one rank of every other node instead of all, in messages as many times larger as a node
has ranks. In both cases rows leave sorted by the rank they go to and arrive sorted by the rank they
come from. With N nodes of L ranks, and blocks of rows named by the coordinate that varies:

    leaving  [N to, L to] -> [L to, N to] -- inside --> [L from, N to] -> [N to, L from] -- across
    --> [N from, L from]

Shapes: n counts a rank and destination (one for each expert there), R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Axis
from plait.comm.uneven import Flight
from plait.models.permute import inverse, permute


@dataclass(frozen=True)
class Roads:
    """The expert axis, and where it spans nodes its parts inside a node and across."""

    whole: Axis
    inside: Axis | None = None
    across: Axis | None = None


class Journey(ABC):
    """Rows [R, ...] under way; `arriving` [ranks, n]: how many come from each rank."""

    arriving: Tensor

    @abstractmethod
    def depart(self, rows: Tensor) -> Tensor:
        """Start; the result may only be given to `arrive`."""

    @abstractmethod
    def arrive(self, waiting: Tensor) -> Tensor:
        """The rows that have come, sorted by the rank that sent them."""

    @abstractmethod
    def home(self, rows: Tensor) -> Tensor:
        """The inverse of both: rows as they arrived -> as they departed."""


def journey(roads: Roads, leaving: Tensor) -> Journey:
    """For `leaving` [ranks, n] rows to each rank. Collective: the ranks tell each other these
    numbers.
    """
    if roads.inside is None or roads.across is None:
        return Direct(roads.whole, leaving)
    return ByNode(roads.inside, roads.across, leaving)


def _told(axis: Axis, counts: Tensor) -> Tensor:
    """What the other ranks have for this one: [ranks, ...] -> the same shape."""
    there = torch.empty_like(counts)
    axis.all_to_all(there, counts).wait()
    return there


def _flight(axis: Axis, leaving: Tensor, arriving: Tensor) -> Flight:
    return Flight(axis, *(counts.flatten(1).sum(1).tolist() for counts in (leaving, arriving)))


class Direct(Journey):
    """One all-to-all of uneven parts."""

    def __init__(self, axis: Axis, leaving: Tensor) -> None:
        leaving = leaving.contiguous()
        self.arriving = _told(axis, leaving)
        self._flight = _flight(axis, leaving, self.arriving)

    def depart(self, rows: Tensor) -> Tensor:
        return self._flight.depart(rows)

    def arrive(self, waiting: Tensor) -> Tensor:
        return self._flight.arrive(waiting)

    def home(self, rows: Tensor) -> Tensor:
        back = self._flight.back()
        return back.arrive(back.depart(rows))


class ByNode(Journey):
    """Two of them: inside the node, then between the ranks of equal place in their nodes."""

    def __init__(self, inside: Axis, across: Axis, leaving: Tensor) -> None:
        here = leaving.view(across.size, inside.size, -1)
        out = here.transpose(0, 1).contiguous()  # [L to, N to, n]
        met = _told(inside, out)  # [L from, N to, n]
        on = met.transpose(0, 1).contiguous()  # [N to, L from, n]
        there = _told(across, on)  # [N from, L from, n]
        self.arriving = there.view(leaving.shape)
        self._first, self._second = _flight(inside, out, met), _flight(across, on, there)
        self._pack, self._turn = _swap_blocks(here.sum(-1)), _swap_blocks(met.sum(-1))

    def depart(self, rows: Tensor) -> Tensor:
        return self._first.depart(permute(rows, self._pack))

    def arrive(self, waiting: Tensor) -> Tensor:
        met = self._first.arrive(waiting)
        return self._second.arrive(self._second.depart(permute(met, self._turn)))

    def home(self, rows: Tensor) -> Tensor:
        for flight, order in ((self._second, self._turn), (self._first, self._pack)):
            back = flight.back()
            rows = permute(back.arrive(back.depart(rows)), inverse(order), order)
        return rows


def _swap_blocks(counts: Tensor) -> Tensor:
    """Blocks of rows laid out [A, B], of these lengths: the order that lays them out [B, A]."""
    a, b = counts.shape
    place = torch.arange(a * b, device=counts.device).view(b, a).t().reshape(-1)
    return place.repeat_interleave(counts.reshape(-1)).argsort(stable=True)
