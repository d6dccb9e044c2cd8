"""Seconds of a block on a processor core, from what the probe measured there
(`plait.cluster.Host`).

No roofline: each kind of operation has its own measured seconds for a number, forward and backward,
and what Python and autograd take is in the way, as nothing runs beside it. Ranks share the cores:
what one rank takes here is on a core of its own, and `step` sees to it that no more work is done at
once than there are cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.cluster.host import Host
from plait.cluster.products import KINDS, WEIGHT_GRAD
from plait.predict.cost.model.operations import Attention, Block, Elementwise, Matmul, Operation
from plait.predict.cost.model.shapes import products
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.machine import Machine

REFERENCE_LAUNCHES = 45.0
"""Kernels, forward and backward, of the GPT block whose overhead the probe measured; others are
counted in the same way.
"""

FORWARD_SHARE = 0.4
"""Of what Python and autograd take for a block."""

MEASURED_EXPERTS = 2
"""Of the block of experts that the probe measured, a chunk each."""

CHUNK_ROWS = 512
STEP_ROWS = 64
"""As `plait.models.gated` has them, which needs torch."""

SHARDED_LOSS_PASSES = 2.0
"""A loss over ranges of the vocabulary, of one over all of it."""


@dataclass(frozen=True)
class Seconds:
    """Of one operation: forward, and the two halves of its backward."""

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    def plus(self, other: Seconds) -> Seconds:
        """The sum."""
        return Seconds(
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
        )


def operation(op: Operation, shard: Sharding, host: Host, *, by_rule: bool = True) -> Seconds:
    """What an operation takes on one rank and micro-batch. `by_rule`: layers may take the quicker
    library (see `product`).
    """
    if isinstance(op, Matmul):
        if op.convolution:
            return _convolution(op, shard, host)
        made = products(op, shard)
        share = made.outputs / op.outputs  # query, key and value are a product each
        parts = [replace(made, outputs=share * part) for part in op.parts] or [made]
        ways = zip(*(part.each() for part in parts), strict=True)
        all_parts = (
            made.copies * sum(product(host, kind, sizes, by_rule=by_rule) for sizes in way)
            for kind, way in zip(KINDS, ways, strict=True)
        )
        bias = made.rows * made.outputs * host.seconds["bias"] if op.bias else 0.0
        return Seconds(*all_parts).plus(Seconds(weight_grad=bias))
    if isinstance(op, Attention):
        return _attention(op, shard, host)
    if isinstance(op, Elementwise):
        return _elementwise(op, shard, host)
    return _of_kind("lookup", shard.tokens * op.width, host)


def product(
    host: Host, kind: str, sizes: tuple[float, float, float], *, by_rule: bool = True
) -> float:
    """One `m x k @ k x n` of `sizes` (m, n, k), by the library that the machine's table names for
    its kind; without `by_rule` as torch itself makes it.
    """
    m, n, k = sizes
    flops = 2.0 * m * n * k
    numbers = m * n + n * k + m * k
    rows = k if kind == WEIGHT_GRAD else m
    if by_rule and kind in host.products.kinds(rows, m * n * k):
        start = host.seconds["product_start"]
        return (
            start + flops * host.seconds["product_flop"] + numbers * host.seconds["product_number"]
        )
    return flops * host.seconds["plain_flop"] + numbers * host.seconds["plain_number"]


def overhead(block: Block, launches: float, host: Host, remat: str = "none") -> float:
    """Seconds of Python and autograd for one block and micro-batch, forward and backward."""
    if block.name in {"head", "embedding", "stem"}:
        return launches / REFERENCE_LAUNCHES * host.blocks["gpt"]["none"]
    return host.blocks[_family(block)][remat]


def _family(block: Block) -> str:
    """The tiny model whose blocks are most like this one."""
    if not any(isinstance(op, Attention) for op in block.operations):
        return (
            "resnet"
            if any(isinstance(op, Matmul) and op.convolution for op in block.operations)
            else "mlp"
        )
    if block.num_experts:
        return "experts"
    return "llama" if any(op.name == "rotary" for op in block.operations) else "gpt"


def dispatched(host: Host) -> float:
    """How many times as long Python takes while selective recomputation looks at every operator."""
    return max(1.0, host.blocks["gpt"]["selective"] / max(host.blocks["gpt"]["none"], 1e-9))


def experts(block: Block, shard: Sharding, host: Host) -> float:
    """The same of the experts that a rank holds, beside those of the block that the probe measured:
    of each of their chunks.
    """
    if not block.num_experts:
        return 0.0
    held = block.num_experts / shard.ep
    return host.engine["expert"] * max(
        0.0, held * expert_chunks(shard.tokens * block.top_k / held) - MEASURED_EXPERTS
    )


def expert_chunks(rows: float) -> float:
    """In how many products an expert takes its rows, as `plait.models.gated` does: so many rows at
    once, and what does not fit a step by itself.
    """
    whole, rest = divmod(rows, CHUNK_ROWS)
    return whole + (rest >= STEP_ROWS) + 1.0


def shared_cores(machine: Machine, work: float, num_ranks: int) -> float:
    """The least seconds in which the cores do the `work` (seconds on one core) of `num_ranks`
    ranks.
    """
    return work / min(machine.cores, num_ranks)


def _attention(op: Attention, shard: Sharding, host: Host) -> Seconds:
    """A context axis divides queries; each still meets the whole sequence."""
    tokens = shard.tokens / shard.tp * (1.0 if op.causal else 2.0)
    flops = op.flops(shard.seq_len) * tokens
    scores = op.num_heads * shard.seq_len * tokens
    times = (
        flops * host.seconds[f"attention_{way}"] + scores * host.seconds[f"score_{way}"]
        for way in ("forward", "backward")
    )
    return Seconds(*times)


def _convolution(op: Matmul, shard: Sharding, host: Host) -> Seconds:
    flops = op.flops() * shard.tokens
    weights = op.parameters
    forward, backward = (
        flops * host.seconds[f"convolution_flop_{way}"]
        + weights * host.seconds[f"convolution_weight_{way}"]
        for way in ("forward", "backward")
    )
    return Seconds(forward, backward / 2, backward / 2)


def _elementwise(op: Elementwise, shard: Sharding, host: Host) -> Seconds:
    split = (
        shard.tp
        if op.split in {"heads", "column", "row"} or shard.mode != "1d"
        else shard.sequence_split
    )
    kind, numbers = _kind(op, shard)
    return _of_kind(kind, numbers * shard.tokens / split, host)


def _of_kind(kind: str, numbers: float, host: Host) -> Seconds:
    return Seconds(
        numbers * host.seconds[f"{kind}_forward"], numbers * host.seconds[f"{kind}_backward"]
    )


def _kind(op: Elementwise, shard: Sharding) -> tuple[str, float]:
    """How the probe calls an operation, and of how many numbers a token it is."""
    if "norm" in op.name:
        if op.split == "none":  # of a convolution, with its activation
            return "group", op.writes / 2
        return "norm" if op.statistics > 1 else "rms", op.writes
    if "activation" in op.name:
        return (
            "gate" if op.reads > op.writes else "relu" if op.name == "activation" else "activation"
        ), op.writes
    if op.name == "loss":
        return "loss", op.writes / 2 * (SHARDED_LOSS_PASSES if shard.tp > 1 else 1.0)
    return (op.name if op.name in {"rotary", "permute"} else "add"), op.writes
