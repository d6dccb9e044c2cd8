"""ZBV, V-Half and V-Min: two stages a rank in a V, and a path whose length is the memory.

Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 3.3 and table
1. On the rank that is first and last a micro-batch is near its end when it returns. So every rank
holds the same. Down and up together stay 2(p-1)x units of a pattern of 6. Here x is the units a
rank of forward and input gradient: 6 (all of 1F1B's memory), 3, 2.
"""

from __future__ import annotations

from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.schedules.compact import compact, vee_block
from plait.parallel.pipeline.schedules.registry import generates


@generates("zbv")
def zbv(num_ranks: int, num_micro_batches: int) -> Schedule:
    """ZBV (Qi et al., arXiv 2405.15362, section 3.3). At most 2p live half-activations a rank
    (1F1B's memory); no bubble from m = 2p on.
    """
    block = vee_block(num_ranks, first=(2, 4), second=(4, 2))
    return Schedule(
        "zbv",
        block.placement,
        num_micro_batches,
        compact(block, num_micro_batches, 2 * num_ranks, eager=True),
    )


@generates("v-half")
def v_half(num_ranks: int, num_micro_batches: int) -> Schedule:
    """V-Half (Qi et al., arXiv 2405.15362, section 3.3). At most p+2 live half-activations a rank
    (half of 1F1B's memory, one micro-batch more); at most half its bubble.
    """
    block = vee_block(num_ranks, first=(2, 1), second=(1, 2))
    return Schedule(
        "v-half",
        block.placement,
        num_micro_batches,
        compact(block, num_micro_batches, num_ranks + 2),
    )


@generates("v-min")
def v_min(num_ranks: int, num_micro_batches: int) -> Schedule:
    """V-Min (Qi et al., arXiv 2405.15362, section 3.3). At most 2 ceil(p/3) + 2 live
    half-activations a rank (a third, one micro-batch more); bubble at most 2/3.
    """
    block = vee_block(num_ranks, first=(1, 1), second=(1, 1))
    return Schedule(
        "v-min",
        block.placement,
        num_micro_batches,
        compact(block, num_micro_batches, 2 * -(-num_ranks // 3) + 2),
    )
