"""The blocks of a plan under `remat:auto`: their options by the planner's numbers, and the choice.

Each pipeline rank chooses for the blocks of its own stages, within its own memory. The numbers are
those of the estimate. Bytes of a block count for each live micro-batch of its stage. Seconds are
those that it computes and sends again. All ranks of a stage have equal numbers, so one choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.axes import REMATS, BlockRemat
from plait.predict.cost.layout import PlanLayout, lay_out
from plait.predict.cost.memory.rank_memory import block_activations, stage_activations
from plait.predict.cost.model.operations import Block, is_layer
from plait.predict.cost.ranks import Question, rank_memory
from plait.predict.cost.records import Job
from plait.predict.cost.remat.dynamic import BlockChoice, MemoryBudget, Option, choose
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.passes import block_pass
from plait.predict.cost.time.stages import StageBlocks

GUARD_BYTES = 1.0
"""Memory left free for the rounding of sums of floats."""


def lay_out_recomputed(job: Job, plan: Plan, machine: Machine) -> PlanLayout:
    """The layout of a plan, its stages with the recomputation of their blocks.

    The words of `Job.remat` are taken where there are any. Errors: those of `lay_out`, and
    `PlanError` for words that are not as many as blocks.
    """
    layout = lay_out(job, plan)
    if plan.remat != "auto":
        return layout
    if job.remat:
        return replace(layout, stages=_with_words(layout.stages, job.remat))
    question = Question(job, plan, machine, layout.shard)
    words: dict[int, tuple[BlockRemat, ...]] = {}
    for rank, held in enumerate(layout.held):
        chosen = iter(_chosen(question, layout, rank))
        for stage in held:
            words[stage] = tuple(next(chosen) for _ in _layers(layout.stages[stage]))
    flat = [word for stage in sorted(words) for word in words[stage]]
    return replace(layout, stages=_with_words(layout.stages, flat))


def words_of(stages: Sequence[StageBlocks]) -> tuple[BlockRemat, ...]:
    """The recomputation of each block in the order of the model, without embedding and head."""
    return tuple(
        word
        for stage in stages
        if stage.remat
        for block, count, word in stage.recomputed("auto")
        if is_layer(block)
        for _ in range(count)
    )


def _layers(stage: StageBlocks) -> Iterator[Block]:
    for block, count in stage.runs:
        if is_layer(block):
            yield from [block] * count


def _with_words(
    stages: Sequence[StageBlocks], words: Sequence[BlockRemat]
) -> tuple[StageBlocks, ...]:
    """The stages with a word for each layer; embedding and head are not recomputed."""
    num_layers = sum(1 for stage in stages for _ in _layers(stage))
    if len(words) != num_layers:
        raise PlanError(
            f"plan.remat has {len(words)} words and the model {num_layers} blocks; give one word "
            "for each block, or leave it out to have them chosen"
        )
    left = iter(words)
    results = []
    for stage in stages:
        runs: list[tuple[Block, int]] = []
        run_words: list[BlockRemat] = []
        for block, count in stage.runs:
            for _ in range(count):
                word: BlockRemat = next(left) if is_layer(block) else "none"
                if runs and runs[-1][0] is block and run_words[-1] == word:
                    runs[-1] = (block, runs[-1][1] + 1)
                else:
                    runs.append((block, 1))
                    run_words.append(word)
        results.append(replace(stage, runs=tuple(runs), remat=tuple(run_words)))
    return tuple(results)


@dataclass(frozen=True)
class _Costs:
    """The numbers of one stage: what they are asked of, live micro-batches, bytes at work."""

    question: Question
    live: int
    beside: float
    """Bytes at work beside a block that is recomputed: its gradients, where they count."""

    def options(self, block: Block) -> tuple[Option, ...]:
        """The options of a block, in the order of `words_for`."""
        question = self.question
        machine = question.machine
        shard = question.shard
        precision, fused, _ = question.job.numerics(question.plan)
        plain = block_pass(block, machine, shard, (precision, fused, "none"))
        whole = block_activations(block, shard.of_largest, (precision, fused, "none"))
        options = []
        for word in words_for(question.plan):
            numerics = (precision, fused, word)
            kept = self.live * block_activations(block, shard.of_largest, numerics, machine.memory)
            one = block_pass(block, machine, shard, numerics)
            again = one.recompute / question.job.runtime.compute_share
            again += one.communication_backward - plain.communication_backward
            working = 0 if word == "none" else ceil(whole + self.beside)
            options.append(Option(ceil(kept), again, working))
        return tuple(options)


def words_for(plan: Plan) -> tuple[BlockRemat, ...]:
    """The words that blocks of a plan may have, least recomputation first.

    A compiled block is recomputed whole or not at all. Operations can be selected in one graph
    alone, and whether a block is one graph depends on its code.
    """
    return ("none", "full") if plan.compile else REMATS


def _chosen(question: Question, layout: PlanLayout, rank: int) -> Iterator[BlockRemat]:
    """The words of a rank's blocks, stage by stage."""
    rules = question.machine.memory
    largest = layout.shard.of_largest
    numerics = question.job.numerics(question.plan)
    beside_layers = least_working = 0.0
    blocks: list[tuple[Option, ...]] = []
    for stage, live in layout.live_stages(rank):
        all_full = stage_activations(stage, largest, (*numerics[:2], "full"), rules)[2]
        beside = all_full if rules.keeps_block_gradients else 0.0
        least_working = max(least_working, beside)
        for block, count in stage.runs:
            if not is_layer(block):
                kept = block_activations(block, largest, (*numerics[:2], "none"), rules)
                beside_layers += kept * count * (1 if block.name == "head" else live)
        costs = _Costs(question, live, beside)
        for block, count in stage.runs:
            if is_layer(block):
                blocks += [costs.options(block)] * count
    fixed = rank_memory(question, layout.ranks[rank], (0.0, 0.0)).total
    factor = 1.0 + rules.fragmentation
    room = MemoryBudget(
        rules.usable_bytes(question.plan) - fixed - factor * beside_layers - GUARD_BYTES,
        factor,
        1.0 + (rules.fragmentation if rules.fragments_working else 0.0),
        least_working,
    )
    words = words_for(question.plan)
    return (words[index] for index in _solved(tuple(blocks), room).options)


@lru_cache(maxsize=256)
def _solved(blocks: tuple[tuple[Option, ...], ...], room: MemoryBudget) -> BlockChoice:
    """The choice of equal questions, made once: many ranks of a pipeline are alike."""
    return choose(blocks, room)
