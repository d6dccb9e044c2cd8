"""Shadowed experts: an expert computes where `ExpertPlacement` has put it.

Shadowing as in He et al., "FasterMoE" (PPoPP 2022), section 4.2, made general. Each rank owns an
equal, contiguous part of the experts. Its optimizer state, its shard and its place in a checkpoint
never move. In a forward the weights of an expert travel from its owner to the ranks with its slots.
In the backward their gradients travel back and are added up. So a placement, or a change of it
between two steps, is no part of the mathematics. The cost of each forward is the weights of experts
away from home. Backward costs as much again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm import Axis
from plait.comm.uneven import UnevenAllToAll
from plait.parallel.expert.placement import ExpertPlacement


class ShadowedExperts:
    """This rank's weights [experts at home, ...] -> weights [slots here, ...]; differentiable.

    Collective.
    """

    def __init__(self, axis: Axis, placement: ExpertPlacement) -> None:
        rank = axis.rank
        each = placement.num_experts // axis.size
        shadows = [_shadows(placement, other, each) for other in range(axis.size)]
        # Which of this rank's experts each other rank shadows, by their index at home.
        sent: list[int] = []
        self._sent: list[int] = []
        for experts in shadows:
            local = [expert % each for expert in experts if expert // each == rank]
            sent += local
            self._sent.append(len(local))
        owners = [expert // each for expert in shadows[rank]]
        self._received = [owners.count(other) for other in range(axis.size)]
        # Each slot's index in the weights at home, followed by those received.
        slots = []
        for expert in placement.experts[rank]:
            if expert // each == rank:
                slots.append(expert % each)
            else:
                slots.append(each + shadows[rank].index(expert))
        self._axis = axis
        self._sent_experts = torch.tensor(sent, dtype=torch.int64)
        self._slots = torch.tensor(slots)

    def __call__(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The weights [slots here, ...] of each tensor [experts at home, ...]. All exchanges start
        before the first is waited for.
        """
        under_way = []
        for weight in weights:
            exchange = UnevenAllToAll(self._axis, self._sent, self._received)
            sent = weight[self._sent_experts.to(weight.device)]
            under_way.append((weight, exchange, exchange.start(sent)))
        return tuple(
            torch.cat((weight, exchange.wait(waiting)))[self._slots.to(weight.device)]
            for weight, exchange, waiting in under_way
        )


def _shadows(placement: ExpertPlacement, rank: int, each: int) -> list[int]:
    """The experts of other owners that a rank has a slot for, in the order of their owners."""
    return sorted({expert for expert in placement.experts[rank] if expert // each != rank})
