"""Naive: one micro-batch at a time through all stages and back; no two ranks ever compute together.

Model parallelism without a pipeline; it is here to be compared with.
"""

from __future__ import annotations

from plait.parallel.pipeline.actions import Action, Schedule, backward, forward, straight
from plait.parallel.pipeline.schedules.registry import generates


@generates("naive")
def naive(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Bubble (p-1)/p; one live activation on every stage."""

    def rank_actions(stage: int) -> tuple[Action, ...]:
        return tuple(
            action
            for j in range(num_micro_batches)
            for action in (forward(stage, j), backward(stage, j))
        )

    return Schedule(
        "naive", straight(num_ranks), num_micro_batches, tuple(map(rank_actions, range(num_ranks)))
    )
