"""GPipe: all forwards, then all backwards, then the update.

Huang et al., GPipe (arXiv 1811.06965), figure 2c. Every micro-batch's activations live at once.
"""

from __future__ import annotations

from plait.parallel.pipeline.actions import Action, Schedule, backward, forward, straight
from plait.parallel.pipeline.schedules.registry import generates


@generates("gpipe")
def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """GPipe (Huang et al. 2019, figure 2c). Bubble (p-1)/(m+p-1); m live activations on every
    stage.
    """

    def rank_actions(stage: int) -> tuple[Action, ...]:
        return tuple(
            kind(stage, j) for kind in (forward, backward) for j in range(num_micro_batches)
        )

    return Schedule(
        "gpipe", straight(num_ranks), num_micro_batches, tuple(map(rank_actions, range(num_ranks)))
    )
