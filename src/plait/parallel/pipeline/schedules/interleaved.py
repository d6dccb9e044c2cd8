"""Interleaved 1F1B: v stages a rank in rounds, so that the pipeline fills v times faster.

Narayanan et al., Megatron-LM (arXiv 2104.04473), section 2.2, figure 4, bottom. Micro-batches
advance through a rank's v stages in groups of p. Where p does not divide m the groups are as even
as can be and at least p. So any m works.
"""

from __future__ import annotations

from itertools import pairwise

from plait.parallel.pipeline.actions import Action, Schedule, backward, forward, looped
from plait.parallel.pipeline.schedules.one_f_one_b import alternate
from plait.parallel.pipeline.schedules.registry import generates


@generates("interleaved")
def interleaved(num_ranks: int, num_micro_batches: int, virtual: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), with `virtual` = v
    stages a rank.

    Bubble (p-1)/v of a forward and backward where p divides m; at most (v+1)p - 2 rank - 1 live
    activations of 1/v size.
    """
    num_groups = max(1, num_micro_batches // num_ranks)
    cuts = [index * num_micro_batches // num_groups for index in range(num_groups + 1)]
    groups = [range(start, stop) for start, stop in pairwise(cuts)]
    largest = max([num_ranks, *map(len, groups)])

    def rank_actions(rank: int) -> tuple[Action, ...]:
        stages = range(rank, num_ranks * virtual, num_ranks)
        forwards = [forward(stage, j) for group in groups for stage in stages for j in group]
        backwards = [
            backward(stage, j) for group in groups for stage in reversed(stages) for j in group
        ]
        return tuple(
            alternate(forwards, backwards, 2 * (num_ranks - rank - 1) + (virtual - 1) * largest)
        )

    ranks = tuple(map(rank_actions, range(num_ranks)))
    return Schedule("interleaved", looped(num_ranks, virtual), num_micro_batches, ranks)
