"""ZB-H1 and ZB-H2: the backward is split, and weight gradients fill the bubble of 1F1B.

Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), figures 2 and 3, table 2. With equal
times of F, I and W the bubble is (p-1) for H1 with 1F1B's memory (p micro-batches) and nothing for
H2 with 2p-1.
"""

from __future__ import annotations

from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.schedules.compact import compact, straight_block
from plait.parallel.pipeline.schedules.registry import generates


@generates("zb-h1")
def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """ZB-H1 (Qi et al., arXiv 2401.10241, section 2). At most p live activations a rank; bubble a
    third of 1F1B's from m = p on.
    """
    block = straight_block(num_ranks, down=1, up=2)
    return Schedule(
        "zb-h1", block.placement, num_micro_batches, compact(block, num_micro_batches, num_ranks)
    )


@generates("zb-h2")
def zb_h2(num_ranks: int, num_micro_batches: int) -> Schedule:
    """ZB-H2 (Qi et al., arXiv 2401.10241, section 2). At most 2p-1 live activations a rank; no
    bubble from m = 2p-1 on, when steps follow each other without a barrier.
    """
    block = straight_block(num_ranks, down=2, up=4)
    return Schedule(
        "zb-h2",
        block.placement,
        num_micro_batches,
        compact(block, num_micro_batches, 2 * num_ranks - 1),
    )
