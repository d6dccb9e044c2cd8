"""`[plan] keep_gathered`: the blocks of a layout that ZeRO-3 keeps whole, and the planner's choice.

Every kept byte saves the same traffic, so the planner's choice is simple. It is the last blocks of
each pipeline rank, as many as its memory has room for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from plait.plan.gathered import gathers_layers, kept_blocks
from plait.predict.cost.layout import PlanLayout, inner_plan, rank_state
from plait.predict.cost.memory.rank_memory import block_weights
from plait.predict.cost.model.operations import Block, is_layer
from plait.predict.cost.ranks import Question, rank_memory
from plait.predict.cost.time.stages import StageBlocks
from plait.predict.cost.widths import BYTES

GUARD_BYTES = 1.0
"""Memory left free for the rounding of sums of floats."""


def kept_of(question: Question, layout: PlanLayout) -> tuple[int, ...]:
    """The numbers of the blocks that stay whole under a plan; none where its ranks gather none.

    Raises `PlanError` for blocks that the model does not have.
    """
    kept = question.job.kept
    plan = question.plan
    if not gathers_layers(plan) or plan.dp.size * plan.cp.size == 1:
        return ()
    if kept != "auto":
        return kept_blocks(plan, kept, sum(len(_layers(stage)) for stage in layout.stages))
    return tuple(sorted(_chosen(question, layout)))


def keeping(question: Question, layout: PlanLayout, kept: Iterable[int]) -> PlanLayout:
    """The layout with these blocks kept whole."""
    numbers = set(kept)
    if not numbers:
        return layout
    stages = []
    index = 0
    for stage in layout.stages:
        counts = []
        for block, count in stage.runs:
            length = count if is_layer(block) else 0
            counts.append(len(numbers.intersection(range(index, index + length))))
            index += length
        stages.append(replace(stage, kept=tuple(counts)))
    inner = inner_plan(question.plan)
    held = (tuple(stages[stage] for stage in own) for own in layout.held)
    ranks = tuple(rank_state(own, inner, question.job.training) for own in held)
    return replace(layout, stages=tuple(stages), ranks=ranks)


def _layers(stage: StageBlocks) -> list[Block]:
    return [block for block, count in stage.runs if is_layer(block) for _ in range(count)]


def _chosen(question: Question, layout: PlanLayout) -> list[int]:
    """The last blocks of each rank, as many as there is room for beside all else."""
    starts = [0]
    for stage in layout.stages:
        starts.append(starts[-1] + len(_layers(stage)))
    limit = question.machine.memory.usable_bytes(question.plan) - GUARD_BYTES
    width = BYTES[question.plan.precision]
    chosen = []
    for rank, held in enumerate(layout.held):
        activations = question.activations(layout.live_stages(rank))
        room = limit - rank_memory(question, layout.ranks[rank], activations).total
        for index in sorted(held, reverse=True):
            layers = list(enumerate(_layers(layout.stages[index]), starts[index]))
            for number, block in reversed(layers):
                needed = sum(block_weights(block, layout.shard)) * width
                if needed <= room:
                    room -= needed
                    chosen.append(number)
    return chosen
