"""Seconds that one rank computes for one block and one micro-batch: a roofline for each operation.

An operation takes the longer of its arithmetic and its memory traffic, plus the start of its
kernels. Backward is two products of the same size for each matrix product: one for the input, one
for the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from plait.plan.precisions import PRECISION, working
from plait.predict.cost.model.operations import (
    LATENT_PRODUCTS,
    Attention,
    Block,
    Elementwise,
    Loss,
    Matmul,
)
from plait.predict.cost.model.shapes import products
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.compute import ComputeSeconds, launches
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.widths import BYTES

COOL_SECONDS = 2e-3
"""Length of a product that, by itself, has half of what `Machine.cool` says (gemm_perf of
aiconfigurator).
"""


LEAN_LOSS = 1.2
"""Times that a lean loss moves its logits forward, where backward counts as 1.5 of it: 3 in all."""


@dataclass(frozen=True)
class Setting:
    """Machine, split and precision: all that a block's compute depends on besides its sizes.

    `in_step`: in the midst of a step, where the device is warm; else by itself.
    """

    machine: Machine
    shard: Sharding
    precision: str = "bf16"
    compiled: bool = False
    in_step: bool = False


def block_seconds(block: Block, setting: Setting) -> ComputeSeconds:
    """The compute of one block for one micro-batch on one rank."""
    return _block_seconds(
        block, setting.machine, setting.shard, setting.precision, setting.compiled
    )


@lru_cache(maxsize=65536)
def _block_seconds(
    block: Block, machine: Machine, shard: Sharding, precision: str, compiled: bool
) -> ComputeSeconds:
    setting = Setting(machine, shard, precision, compiled, in_step=True)
    forward = input_grad = weight_grad = attention = elementwise = grouped = linear = 0.0
    latent = 0.0
    fused = all(op.fused for op in block.operations if isinstance(op, Attention))
    for op in block.operations:
        if isinstance(op, Matmul):
            f, i, w = _matmul(op, setting, rounds=is_rounded(block, op, precision))
            forward = forward + f
            input_grad = input_grad + i
            weight_grad = weight_grad + w
            grouped += f if op.copies > 1 else 0.0
            linear += f if op.copies <= 1 else 0.0
            latent += f if op.name in LATENT_PRODUCTS else 0.0
        elif isinstance(op, Attention):
            f, b = attention_seconds(op, setting)
            forward = forward + f
            input_grad = input_grad + b
            attention = attention + f
        elif isinstance(op, Elementwise):
            f = _elementwise(op, setting)
            forward = forward + f
            input_grad = input_grad + 1.5 * f
            elementwise = elementwise + f
    starts = [launches(op, compiled) for op in block.operations]
    starts += [
        (1.0, 1.0)  # the kernels that round
        for op in block.operations
        if isinstance(op, Matmul) and is_rounded(block, op, precision)
    ]
    kept = elementwise + grouped if fused else 0.0
    part = shard.repeated_products
    repeated = kept + (part * linear if part else attention)
    if shard.repeats_latents:
        repeated = elementwise + latent
    return ComputeSeconds(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        attention=attention,
        full=forward,
        selective=repeated,
        launches_forward=sum(f for f, _ in starts),
        launches_backward=sum(b for _, b in starts),
    )


def is_rounded(block: Block, op: Matmul, precision: str) -> bool:
    """Whether a product is computed in eight bits or fewer: those of a block's linear layers."""
    return (
        PRECISION[precision].rounds_products
        and block.name not in {"embedding", "head", "stem"}
        and op.name not in {"router", "shared_gate"}
        and not (op.weightless or op.convolution)
    )


def _matmul(op: Matmul, setting: Setting, *, rounds: bool = False) -> tuple[float, float, float]:
    sizes = products(op, setting.shard)
    forward, input_grad, weight_grad = (
        sizes.copies * gemm_seconds(setting, m, n, k) for m, n, k in sizes.each()
    )
    if not rounds:
        return forward, input_grad, weight_grad
    part = PRECISION[setting.precision].rounded_layers
    small = [sizes.copies * rounded_gemm_seconds(setting, m, n, k) for m, n, k in sizes.each()]
    # The input is rounded in forward. What comes back is rounded once, for both halves of backward.
    taken = sizes.copies * rounding_seconds(setting, sizes.rows * sizes.inputs)
    returned = sizes.copies * rounding_seconds(setting, sizes.rows * sizes.outputs)
    return (
        forward + part * (small[0] + taken - forward),
        input_grad + part * (small[1] + returned - input_grad),
        weight_grad + part * (small[2] - weight_grad),
    )


def rounded_gemm_seconds(setting: Setting, m: float, n: float, k: float) -> float:
    """One product of rounded factors, whose result is in the working precision."""
    machine = setting.machine
    efficiency = machine.efficiency
    facts = PRECISION[setting.precision]
    depth = k + efficiency.matmul_depth
    rows = m + efficiency.matmul_rows
    compute = 2.0 * rows * n * depth / machine.matmul_rate(setting.precision)
    moved = (n * k + m * k) * facts.rounded_bytes + m * n * facts.num_bytes
    return max(compute, moved / machine.streaming_rate) + efficiency.kernel_seconds


def rounding_seconds(setting: Setting, numbers: float) -> float:
    """Rounding of a tensor into two layouts, one for each product that reads it."""
    facts = PRECISION[setting.precision]
    read = facts.num_bytes * (1.0 + facts.amax_passes)
    written = 2.0 * facts.rounded_bytes
    machine = setting.machine
    return numbers * (read + written) / machine.streaming_rate + machine.efficiency.kernel_seconds


def gemm_seconds(setting: Setting, m: float, n: float, k: float) -> float:
    """One `m x k @ k x n`: the roofline, with the depth that tile edges cost."""
    machine = setting.machine
    efficiency = setting.machine.efficiency
    depth = k + efficiency.matmul_depth
    rows = m + efficiency.matmul_rows
    compute = 2.0 * rows * n * depth / machine.matmul_rate(working(setting.precision))
    if not setting.in_step:
        compute *= efficiency.matmul
        compute /= 1.0 + machine.cool / (1.0 + compute / COOL_SECONDS)
    memory = (m * n + n * k + m * k) * BYTES[setting.precision] / machine.streaming_rate
    return max(compute, memory) + efficiency.kernel_seconds


def attention_seconds(op: Attention, setting: Setting) -> tuple[float, float]:
    """Seconds forward and backward. A context axis divides queries; each still meets the whole
    sequence.
    """
    machine = setting.machine
    shard = setting.shard
    efficiency = setting.machine.efficiency
    tokens = shard.tokens * (1.0 / shard.tp)
    flops = op.flops(shard.seq_len) * tokens
    if op.fused:
        in_parts = shard.cp > 1 and shard.context == "ring"
        kernel = "portable" if in_parts and op.kernel == "chosen" else op.kernel
        flops *= 0.5 if op.causal else 1.0
        reach = (
            shard.seq_len
            / (shard.seq_len + efficiency.attention_half_length)
            * op.head_dim
            / (op.head_dim + efficiency.attention_depth)
        )
        rate = (
            machine.peak_flops[working(setting.precision)]
            * machine.sustained
            * reach
            * machine.attention[kernel]
        )
        start = efficiency.attention_seconds * shard.cp
        moved = _attention_bytes(op, setting) / machine.streaming_rate
        forward = flops / (rate * efficiency.attention_forward) + moved + start
        backward = 2.5 * flops / (rate * efficiency.attention_backward) + 2.0 * moved + start
        return forward, backward
    depth = 1.0 + efficiency.matmul_depth / op.head_dim
    products = flops * depth / machine.matmul_rate(working(setting.precision))
    scores = tokens * shard.seq_len * op.num_heads * BYTES[setting.precision]
    passes = (
        (6.5 if op.dropout else 4.0)
        * scores
        / machine.streaming_rate
        * (1.0 if setting.compiled else efficiency.eager_passes)
    )
    start = 4 * efficiency.kernel_seconds
    return products + passes + start, 2.0 * (products + passes + start)


def _attention_bytes(op: Attention, setting: Setting) -> float:
    """Queries, keys and values that are read, and what is written. A context axis meets the keys
    and values of every rank.
    """
    shard = setting.shard
    own = op.num_heads * (op.head_dim + op.value_dim)
    others = op.num_kv_heads * (op.head_dim + op.value_dim) * shard.cp
    return shard.tokens / shard.tp * (own + others) * BYTES[setting.precision]


def _elementwise(op: Elementwise, setting: Setting) -> float:
    shard = setting.shard
    efficiency = setting.machine.efficiency
    split = (
        shard.tp
        if op.split in {"heads", "column", "row"} or shard.mode != "1d"
        else shard.sequence_split
    )
    numbers = (op.reads + op.writes) * shard.tokens / split
    if isinstance(op, Loss) and setting.compiled and op.is_lean(shard.tokens / split):
        numbers = LEAN_LOSS * op.vocab * shard.tokens / split
    passes = 1.0 if setting.compiled else efficiency.eager_passes
    return (
        passes * numbers * BYTES[setting.precision] / setting.machine.streaming_rate
        + efficiency.kernel_seconds
    )
