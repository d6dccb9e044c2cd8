"""Activations of blocks that wait in host memory (`[plan] offload_activations`).

Two blocks are on the device at once: the one at work, and the one whose copies are under way. What
embedding, head and loss keep stays. The copies of a pass hide behind its kernels where they take
less time.
"""

from __future__ import annotations

from functools import lru_cache

from plait.predict.cost.memory.rank_memory import (
    Numerics,
    block_activations,
    stage_activations,
)
from plait.predict.cost.memory.rules import DEVICE, MemoryRules
from plait.predict.cost.model.operations import is_layer
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.stages import StageBlocks

AT_ONCE = 2
"""Blocks on the device."""

Held = tuple[tuple[StageBlocks, int], ...]
"""The stages of a rank, each with its live micro-batches."""


def on_device(
    held: Held, shard: Sharding, numerics: Numerics, rules: MemoryRules = DEVICE
) -> tuple[float, float]:
    """Bytes that a rank keeps on its device, and what the block at work needs besides, as
    `rank_activations` has them.
    """
    kept_bytes = in_flight = working = 0.0
    for stage, live in held:
        working = max(working, stage_activations(stage, shard, numerics, rules)[2])
        for block, count, remat in stage.recomputed(numerics[2]):
            each = block_activations(block, shard, (*numerics[:2], remat), rules)
            if is_layer(block):
                in_flight = max(in_flight, each * min(AT_ONCE, count * live))
            else:
                kept_bytes += each * count * (1 if block.name == "head" else live)
    kept_bytes += in_flight
    return kept_bytes, working + rules.fragmentation * kept_bytes


def on_host(held: Held, shard: Sharding, numerics: Numerics) -> float:
    """Bytes of all live micro-batches of a rank in the memory of its host."""
    return sum(live * of_pass(stage, shard, numerics) for stage, live in held)


@lru_cache(maxsize=4096)
def of_pass(stage: StageBlocks, shard: Sharding, numerics: Numerics) -> float:
    """Bytes that one micro-batch moves down in a forward of a stage, and up in its backward."""
    return sum(
        count * block_activations(block, shard, (*numerics[:2], remat))
        for block, count, remat in stage.recomputed(numerics[2])
        if is_layer(block)
    )
