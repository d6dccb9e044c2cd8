"""Dispatch and combine: rows go to the ranks that hold their experts, and come back.

Lepikhin et al., "GShard" (2020), section 3.2, without padding: the all-to-all has uneven splits, so nothing is sent that is
not there and nothing is dropped because a buffer is full. Rows leave sorted by expert, hence by rank; they arrive sorted by
sender and are sorted by expert, once, on the way into the grouped product. Sent by a rank: each way the rows whose expert is
elsewhere, forward and backward, and forward the counts of all experts.

    rank 0: e0 e0 e1 e3          -> rank 0 (e0 e1): e0 e0 e1 | e1          -> e0 e0 e1 e1 -> computed -> back
    rank 1: e1 e2 e2 e3          -> rank 1 (e2 e3): e3 | e2 e2 e3          -> e2 e2 e3 e3
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm import Axis
from plait.comm.uneven import Flight
from plait.models.experts import Exchange, Trip


class ExpertExchange(Exchange):
    """Experts in equal, contiguous parts over `axis`."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def dispatch(self, rows: Tensor, counts: Tensor) -> Trip:
        """Tell every rank what comes, and let the rows depart."""
        size = self.axis.size
        here = counts.to(torch.int64).contiguous()
        there = torch.empty_like(here)
        self.axis.all_to_all(there, here).wait()
        sent, received = (part.view(size, -1).sum(1).tolist() for part in (here, there))
        return _RankTrip(rows, Flight(self.axis, sent, received), there.view(size, -1))


class _RankTrip(Trip):
    """`arriving` [ranks, experts here]: how many rows come from which rank for which expert."""

    def __init__(self, rows: Tensor, flight: Flight, arriving: Tensor) -> None:
        self._flight, self._arriving = flight, arriving
        self._waiting = flight.depart(rows)

    def arrive(self) -> tuple[Tensor, list[int]]:
        rows = self._flight.arrive(self._waiting)
        experts = torch.arange(self._arriving.shape[1], device=rows.device).repeat(self._arriving.shape[0])
        order = experts.repeat_interleave(self._arriving.reshape(-1)).argsort(stable=True)
        self._back = torch.empty_like(order)
        self._back[order] = torch.arange(len(order), device=order.device)
        return rows[order], self._arriving.sum(0).tolist()

    def combine(self, rows: Tensor) -> Tensor:
        flight = self._flight.back()
        return flight.arrive(flight.depart(rows[self._back]))
