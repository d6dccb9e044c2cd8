"""Weights on a visit: an expert computes where `Layout` has put it, and stays at home everywhere
else.

Shadowing of experts as in He et al., "FasterMoE" (PPoPP 2022), section 4.2, made general. Each rank
goes on owning an equal, contiguous part of the experts: its optimizer state, its shard, its place
in a checkpoint never move. In a forward the weights of a slot whose expert is at home elsewhere
travel there, and in the backward their gradients travel back and are added up. So a layout, or a
change of it between two steps, is no part of the mathematics. It costs, for each forward, the
weights of the experts that are not at home, and as much again backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm import Axis
from plait.comm.uneven import Flight
from plait.parallel.expert.placement import Layout


class Guests:
    """Own weights [experts at home, ...] -> weights [slots here, ...]; differentiable.
    Collective.
    """

    def __init__(self, axis: Axis, layout: Layout) -> None:
        rank = axis.rank
        each = layout.num_experts // axis.size
        visitors = [_visitors(layout, other, each) for other in range(axis.size)]
        leaving = [
            [expert % each for expert in guests if expert // each == rank] for guests in visitors
        ]
        self._axis = axis
        self._leaving = torch.tensor(
            [expert for experts in leaving for expert in experts], dtype=torch.int64
        )
        self._sent = [len(experts) for experts in leaving]
        self._received = [
            sum(expert // each == other for expert in visitors[rank]) for other in range(axis.size)
        ]
        self._slots = torch.tensor(
            [
                expert % each if expert // each == rank else each + visitors[rank].index(expert)
                for expert in layout.experts[rank]
            ]
        )

    def __call__(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All set out before the first is waited for."""
        under_way = []
        for weight in weights:
            flight = Flight(self._axis, self._sent, self._received)
            under_way.append(
                (weight, flight, flight.depart(weight[self._leaving.to(weight.device)]))
            )
        return tuple(
            torch.cat((weight, flight.arrive(waiting)))[self._slots.to(weight.device)]
            for weight, flight, waiting in under_way
        )


def _visitors(layout: Layout, rank: int, each: int) -> list[int]:
    """The experts that a rank has a slot for and that are at home elsewhere, in the order of their
    homes.
    """
    return sorted({expert for expert in layout.experts[rank] if expert // each != rank})
