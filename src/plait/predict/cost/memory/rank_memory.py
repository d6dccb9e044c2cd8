"""Bytes of one rank, by part: parameters, gradients, optimizer state, activations, buffers.

Model states follow Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (section 5). Activations follow Korthikanti et al. (section 4), with as many live
micro-batches as the schedule itself keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from plait.plan import Plan
from plait.plan.axes import Remat
from plait.plan.facts import STRATEGIES
from plait.plan.precisions import PRECISION
from plait.predict.cost.memory.local_sizes import held, tied_split
from plait.predict.cost.memory.rules import DEVICE, MemoryRules
from plait.predict.cost.model.operations import (
    LATENT_PRODUCTS,
    Attention,
    Block,
    Elementwise,
    Loss,
    Matmul,
)
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.stages import StageBlocks
from plait.predict.cost.widths import BYTES

Numerics = tuple[str, bool, Remat]
"""Precision, whether elementwise operations are fused, and what is recomputed."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the parts."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all parts together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    def as_dict(self) -> dict[str, float]:
        """The parts and their sum, in bytes."""
        names = ("parameters", "gradients", "optimizer", "activations", "buffers", "total")
        return {name: float(round(getattr(self, name))) for name in names}


@dataclass(frozen=True)
class WeightBytes:
    """Numbers that a stage keeps on one rank before any data axis divides them."""

    dense: float
    experts: float
    largest_block: float
    """The largest block's weights: what ZeRO-3 gathers at once."""
    padding: float = 0.0
    """Numbers that a ring adds to blocks that its ranks do not divide."""
    least_keys: float | None = None
    """Numbers of the parameter server that owns fewest; None: an equal share."""
    least_expert_keys: float = 0.0
    """Numbers of the server of experts that owns fewest, where an expert axis divides them."""
    kept_dense: float = 0.0
    """Dense weights that ZeRO-3 keeps whole once they are gathered (`[plan] keep_gathered`)."""
    kept_experts: float = 0.0
    """Weights of experts that it keeps so."""
    kept_share: float = 0.0
    """The part of the blocks that it keeps so."""

    @property
    def total(self) -> float:
        """Dense and expert weights."""
        return self.dense + self.experts

    def times(
        self, part: float, dense: float | None = None, experts: float | None = None
    ) -> WeightBytes:
        """So many parts of each number, without what strategies add.

        `dense` and `experts` are the parts of these numbers, where they are others.
        """
        of_dense = part if dense is None else dense
        of_experts = part if experts is None else experts
        return WeightBytes(
            self.dense * of_dense,
            self.experts * of_experts,
            self.largest_block * part,
            kept_dense=self.kept_dense * of_dense,
            kept_experts=self.kept_experts * of_experts,
            kept_share=self.kept_share,
        )


@lru_cache(maxsize=65536)
def stage_weights(stages: tuple[StageBlocks, ...], shard: Sharding, tied: int) -> WeightBytes:
    """The weights of the stages of one rank; `tied` numbers are stored once when first and last
    stage share the rank.
    """
    dense = experts = largest = kept_dense = kept_experts = 0.0
    blocks = kept_blocks = 0
    for stage in stages:
        for block, count, kept in stage.kept_runs():
            own_dense, own_experts = block_weights(block, shard)
            dense += own_dense * count
            experts += own_experts * count
            largest = max(largest, own_dense + own_experts)
            kept_dense += own_dense * kept
            kept_experts += own_experts * kept
            blocks += count
            kept_blocks += kept
    if any(stage.first for stage in stages) and any(stage.last for stage in stages):
        blocks_here = (block for stage in stages for block, _, _ in stage.kept_runs())
        dense -= tied / tied_split(blocks_here, shard)
    return WeightBytes(
        dense,
        experts,
        largest,
        kept_dense=kept_dense,
        kept_experts=kept_experts,
        kept_share=kept_blocks / blocks,
    )


@lru_cache(maxsize=65536)
def block_weights(block: Block, shard: Sharding) -> tuple[float, float]:
    """Numbers of one block on one rank: dense weights and expert weights."""
    own = held(block, shard)
    return sum(one.numbers for one in own if not one.expert), sum(
        one.numbers for one in own if one.expert
    )


def block_activations(
    block: Block, shard: Sharding, numerics: Numerics, rules: MemoryRules = DEVICE
) -> float:
    """Bytes that one block keeps of one micro-batch until its backward; `numerics` is (precision,
    compiled, recomputation).

    `full` keeps the block's input. `selective` keeps the outputs of matrix products and repeats the
    rest. Where attention is not fused it is Korthikanti's, which keeps everything but the scores.
    """
    precision, compiled, remat = numerics
    width = BYTES[precision]
    tokens = shard.tokens
    saved = block.saved
    inner = block.name not in {"head", "embedding"}
    if remat == "selective" and inner and shard.repeats_latents:
        return tokens * rounded_inputs(block) / shard.tp
    if remat != "none" and inner and (remat == "full" or not saved.scores):
        sequence = tensor = 0.0
        if remat == "selective":
            sequence, tensor = products_kept(block, experts=rules.keeps_expert_products)
            sequence *= 1.0 - shard.repeated_products
            tensor *= 1.0 - shard.repeated_products
            if shard.repeated_products:  # what the attention gives is kept instead
                tensor += sum(
                    op.num_heads * op.value_dim
                    for op in block.operations
                    if isinstance(op, Attention)
                )
        kept = (
            tokens * width * ((sequence + block.width) / shard.sequence_split + tensor / shard.tp)
        )
        return min(kept, block_activations(block, shard, (precision, compiled, "none"), rules))
    gathered = saved.gathered * width * (1 - 1 / shard.sequence_split) * shard.gathered_share
    sequence = (saved.sequence * width + saved.sequence_masks) / shard.sequence_split + gathered
    numbers = saved.tensor + saved.routed + (0.0 if compiled else saved.unfused)
    # The loss keeps its logits in the working width and in float32: as themselves, as probabilities
    # and as gradients;
    # fused, once.
    copies = 1.5 if compiled else 3.0
    loss = saved.logits * (
        4.0 * copies if PRECISION[precision].has_masters else width * (copies - 1.0)
    )
    losses = (op for op in block.operations if isinstance(op, Loss))
    if any(op.is_lean(tokens / shard.tp, rules.large_logits) for op in losses):
        loss = saved.logits * width  # their gradient
    tensor = (numbers * width + saved.tensor_masks + 4.0 * saved.statistics + loss) / shard.tp
    scores = (
        0.0
        if remat == "selective"
        else (saved.scores * width + saved.score_masks) * shard.seq_len / shard.tp
    )
    return tokens * (sequence + tensor + scores)


def rank_activations(
    held: tuple[tuple[StageBlocks, int], ...],
    shard: Sharding,
    numerics: Numerics,
    rules: MemoryRules = DEVICE,
) -> tuple[float, float]:
    """Bytes that a rank keeps for backward, and what the block at work needs besides; `held` pairs
    stages with live micro-batches.
    """
    kept_bytes = working = 0.0
    for stage, live in held:
        always, each, block = stage_activations(stage, shard, numerics, rules)
        kept_bytes += always + each * live
        working = max(working, block)
        if rules.keeps_block_gradients:
            working = max(
                working, block + stage_activations(stage, shard, (*numerics[:2], "full"), rules)[2]
            )
    fragmented = kept_bytes + (working if rules.fragments_working else 0.0)
    return kept_bytes, working + rules.fragmentation * fragmented


@lru_cache(maxsize=65536)
def stage_activations(
    stage: StageBlocks, shard: Sharding, numerics: Numerics, rules: MemoryRules = DEVICE
) -> tuple[float, float, float]:
    """Bytes kept once (the head's, freed by the backward that follows at once), for each live
    micro-batch, and at work.
    """
    once = each = working = 0.0
    for block, count, remat in stage.recomputed(numerics[2]):
        kept = block_activations(block, shard, (*numerics[:2], remat), rules) * count
        if block.name == "head":
            once += kept
        else:
            each += kept
        if remat != "none" and block.name != "head":
            working = max(
                working, block_activations(block, shard, (numerics[0], numerics[1], "none"))
            )
    return once, each, working


@lru_cache(maxsize=4096)
def products_kept(block: Block, *, experts: bool) -> tuple[float, float]:
    """Numbers for each token of a block's matrix products' outputs, in the sequence region and in
    the tensor region. Those of `experts` are products like others on a processor; elsewhere they
    are one grouped product, which is not kept.
    """
    sequence = tensor = 0.0
    for op in block.operations:
        if isinstance(op, Matmul) and op.copies > 1 and not experts:
            continue
        if isinstance(op, Matmul) and op.split == "column":
            tensor += op.rows * op.outputs
        elif isinstance(op, Matmul):
            sequence += op.rows * op.outputs
    return sequence, tensor


ROUNDED_BYTES = 1.0
ROUNDED_OUTPUT_BYTES = 1.5
"""Width of an input kept in eight bits, and of that of the attention's output layer in twelve
(DeepSeek-V3, section 3.3.3).
"""


def rounded_inputs(block: Block) -> float:
    """Bytes of a token that a block keeps under `Runtime.repeats_latents`.

    They are what norms and activations read, latents, what the attention gives, and the tokens of
    experts.
    """
    kept_bytes = 0.0
    for op in block.operations:
        if isinstance(op, Elementwise) and op.name.startswith("norm"):
            kept_bytes += 2.0 * op.reads
        elif isinstance(op, Matmul) and op.name in LATENT_PRODUCTS:
            kept_bytes += ROUNDED_BYTES * op.inputs
        elif isinstance(op, Matmul) and op.name == "out":
            kept_bytes += ROUNDED_OUTPUT_BYTES * op.inputs
        elif isinstance(op, Matmul) and op.name.endswith("_up"):
            copied = op.inputs if op.copies > 1 else 0
            kept_bytes += ROUNDED_BYTES * op.rows * (copied + op.outputs)
    return kept_bytes


def updated_numbers(weights: WeightBytes, plan: Plan) -> float:
    """The weights that a rank updates: its part of them where the data axis divides the optimizer's
    state.
    """
    if not STRATEGIES[plan.dp.strategy].shards_optimizer:
        return weights.total
    shard = plan.optimizer_shards
    return weights.dense / shard + weights.experts / max(1, shard // plan.ep)


def optimizer_bytes(weights: WeightBytes, plan: Plan, state_numbers: float) -> float:
    """Bytes of the optimizer's state, master weights included, wherever it lives."""
    numbers = state_numbers + (1 if PRECISION[plan.precision].has_masters else 0)
    return updated_numbers(weights, plan) * numbers * (8 if plan.precision == "float64" else 4)


def model_states(
    weights: WeightBytes, plan: Plan, state_numbers: float, gradient_bytes: float
) -> RankMemory:
    """Parameters, gradients and optimizer state after the data axis has taken its share (ZeRO
    stages 0 to 3).
    """
    facts = STRATEGIES[plan.dp.strategy]
    precision = PRECISION[plan.precision]
    own = updated_numbers(weights, plan)
    kept = precision.num_bytes + precision.rounded_bytes  # weights are rounded once a step
    return RankMemory(
        parameters=(own if facts.shards_parameters else weights.total) * kept,
        gradients=(own if facts.shards_gradients else weights.total) * gradient_bytes,
        optimizer=0.0 if plan.dp.offload else optimizer_bytes(weights, plan, state_numbers),
    )
