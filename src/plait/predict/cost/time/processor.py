"""Seconds of a block on a processor core, from what the probe measured there
(`plait.cluster.CpuProfile`).

There is no roofline here. Each kind of operation has its own measured seconds for a number, forward
and backward. The time of Python and autograd adds to it, as nothing runs beside it. Ranks share the
cores. The times here are of a rank with a core of its own, and `step` limits simultaneous work to
the cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.cluster.cpu_profile import REMAT, CpuProfile
from plait.cluster.products import KINDS, WEIGHT_GRAD
from plait.comm.transitions import bytes_sent
from plait.plan import Plan
from plait.predict.cost.model.adapters import ADAPTER
from plait.predict.cost.model.operations import Attention, Block, Elementwise, Matmul, Operation
from plait.predict.cost.model.shapes import products
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.collectives import messages_seconds
from plait.predict.cost.time.compute import ComputeSeconds, launches
from plait.predict.cost.time.gradients import Buckets, DataMessages
from plait.predict.cost.time.groups import Group
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.messages import Message
from plait.predict.cost.time.synchronization import (
    collective,
    inside_block,
    meeting_seconds,
    reduction,
    ring,
)

REFERENCE_LAUNCHES = 45.0
"""Kernels, forward and backward, of the GPT block whose overhead the probe measured; others are
counted in the same way.
"""

FORWARD_SHARE = 0.4
"""Part of the overhead of Python and autograd that a block's forward has."""

STATE_BYTES = 8.0
"""Bytes of optimizer state of each weight in the update that the probe measures."""

MEASURED_EXPERTS = 2
"""Experts of the block that the probe measured, a chunk each."""

CHUNK_ROWS = 512
STEP_ROWS = 64
"""Rows of a step; both numbers are those of `plait.models.gated`, which needs torch."""

SHARDED_LOSS_PASSES = 2.0
"""A loss over ranges of the vocabulary, of one over all of it."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one operation: forward, and the two halves of its backward."""

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Processor(Machine):
    """A processor that was measured; a core that computes communicates itself, so nothing is
    hidden.
    """

    profile: CpuProfile

    def block_seconds(
        self, block: Block, shard: Sharding, precision: str, compiled: bool
    ) -> ComputeSeconds:
        """Measured seconds of each operation, and of Python for each block."""
        total = Seconds()
        core = 0.0
        cheap = 0.0
        by_rule = precision == "float32" and not compiled
        for op in block.operations:
            one = operation(op, shard, self.profile, by_rule=by_rule)
            total = total.plus(one)
            if isinstance(op, Attention):
                core += one.forward
            if isinstance(op, Elementwise):  # products of experts are kept, as others are
                cheap += one.forward
        started = sum(sum(launches(op, compiled)) for op in block.operations)
        always = experts(block, shard, self.profile) + ring(block, shard, self)
        alone, full, selective = (overhead(block, started, self.profile, remat) for remat in REMAT)
        share = FORWARD_SHARE
        stretch = self.profile.engine["stretch"]
        again = share * always * dispatched(self.profile)
        return ComputeSeconds(
            forward=stretch * (total.forward + share * (alone + always)),
            input_grad=stretch * (total.input_grad + (1 - share) * (alone + always)),
            weight_grad=stretch * total.weight_grad,
            attention=stretch * core,
            full=stretch * (total.forward + max(0.0, full - alone) + share * always),
            selective=stretch * (core + cheap + max(0.0, selective - alone) + again),
        )

    def collective_seconds(self, op: str, payload_bytes: float, ranks: Group) -> float:
        """Measured latency and rate."""
        if ranks.size <= 1 or payload_bytes <= 0:
            return 0.0
        sent_bytes = float(bytes_sent(op, int(payload_bytes), ranks.size))
        return collective(self, op, sent_bytes, ranks.size)

    def message_seconds(self, message: Message, shard: Sharding) -> float:
        """The collective in the midst of a block, with all that the engine does for it."""
        return message.count * inside_block(self, message, shard)

    def sharded_seconds(
        self, data: DataMessages, buckets: Buckets, plan: Plan, compute: tuple[float, float]
    ) -> tuple[float, float]:
        """The messages, and new memory for what is gathered and for gradients that are scattered
        at once.
        """
        fresh = self.profile.seconds["fresh"]
        forward = reduction(self, data.forward, buckets, plan)
        backward = reduction(self, data.backward, buckets, plan)
        gathered = sum(one.payload_bytes for one in data.forward) * fresh
        scattered = sum(one.payload_bytes for one in data.backward) * fresh
        return forward + gathered, backward + scattered

    def reduction_seconds(
        self, data: DataMessages, buckets: Buckets, plan: Plan, hidden: float
    ) -> float:
        """All messages, one after another."""
        exposed = reduction(self, (*data.reduce, *data.gather), buckets, plan)
        return exposed + messages_seconds(self, data.shared)

    def accumulation_seconds(self, numbers: float, width: float, micro_batches: int) -> float:
        """The first gradients are copied to where the others are added."""
        return numbers * self.profile.seconds["add_forward"]

    def copy_seconds(self, num_bytes: float) -> float:
        """Nothing: `accumulation_seconds` has it."""
        return 0.0

    def update_seconds(self, state_bytes: float, gradient_bytes: float = 0.0) -> float:
        """The measured update; gradients are new memory in each step."""
        update = state_bytes / STATE_BYTES * self.profile.seconds["update"]
        return update + gradient_bytes * self.profile.seconds["fresh"]

    def action_seconds(self, plan: Plan) -> float:
        """Half of a micro-batch's seconds, and a hand-over between stages."""
        seconds = self.profile.engine["micro_batch"] / 2
        if plan.pp.size > 1:
            seconds += meeting_seconds(self, "hand", 2, plan.world_size)
        return seconds

    def shares_cores(self, num_ranks: int) -> bool:
        """More ranks than cores take turns."""
        return num_ranks > self.cores

    def shared_seconds(self, work: float, num_ranks: int) -> float:
        """The work on all cores, with the time in which fewer ranks than cores can go on."""
        if not self.shares_cores(num_ranks):
            return 0.0
        return work / min(self.cores, num_ranks) * self.profile.engine["idle"]


def operation(
    op: Operation, shard: Sharding, profile: CpuProfile, *, by_rule: bool = True
) -> Seconds:
    """Seconds of an operation on one rank and micro-batch. `by_rule`: layers may take the quicker
    library (see `product`).
    """
    if isinstance(op, Matmul):
        if op.convolution:
            return _convolution(op, shard, profile)
        whole = products(op, shard)
        share = whole.outputs / op.outputs  # query, key and value are a product each
        parts = [replace(whole, outputs=share * part) for part in op.parts] or [whole]
        ways = zip(*(part.each() for part in parts), strict=True)
        seconds = []
        for kind, way in zip(KINDS, ways, strict=True):
            one_copy = sum(product(profile, kind, sizes, by_rule=by_rule) for sizes in way)
            seconds.append(whole.copies * one_copy)
        bias = whole.rows * whole.outputs * profile.seconds["bias"] if op.bias else 0.0
        return Seconds(*seconds).plus(Seconds(weight_grad=bias))
    if isinstance(op, Attention):
        return _attention(op, shard, profile)
    if isinstance(op, Elementwise):
        return _elementwise(op, shard, profile)
    return _of_kind("lookup", shard.tokens * op.width, profile)


def product(
    profile: CpuProfile, kind: str, sizes: tuple[float, float, float], *, by_rule: bool = True
) -> float:
    """One `m x k @ k x n` of `sizes` (m, n, k), by the library that the machine's table names for
    its kind. Without `by_rule` torch chooses.
    """
    m, n, k = sizes
    flops = 2.0 * m * n * k
    numbers = m * n + n * k + m * k
    rows = k if kind == WEIGHT_GRAD else m
    if by_rule and kind in profile.products.kinds(rows, m * n * k):
        start = profile.seconds["product_start"]
        return (
            start
            + flops * profile.seconds["product_flop"]
            + numbers * profile.seconds["product_number"]
        )
    return flops * profile.seconds["plain_flop"] + numbers * profile.seconds["plain_number"]


def overhead(block: Block, launches: float, profile: CpuProfile, remat: str = "none") -> float:
    """Seconds of Python and autograd for one block and micro-batch, forward and backward."""
    if block.name in {"head", "embedding", "stem", ADAPTER}:
        return launches / REFERENCE_LAUNCHES * profile.blocks["gpt"]["none"]
    return profile.blocks[_family(block)][remat]


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


def dispatched(profile: CpuProfile) -> float:
    """How many times as long Python takes while selective recomputation looks at every operator."""
    return max(1.0, profile.blocks["gpt"]["selective"] / max(profile.blocks["gpt"]["none"], 1e-9))


def experts(block: Block, shard: Sharding, profile: CpuProfile) -> float:
    """Overhead of the chunks of a rank's experts, beyond the experts of the block that the probe
    measured.
    """
    if not block.num_experts:
        return 0.0
    held = block.num_experts / shard.ep
    return profile.engine["expert"] * max(
        0.0, held * expert_chunks(shard.tokens * block.top_k / held) - MEASURED_EXPERTS
    )


def expert_chunks(rows: float) -> float:
    """The number of products in which an expert takes its rows, as `plait.models.gated` does. A
    step has so many rows, and the remainder is one by itself.
    """
    whole, rest = divmod(rows, CHUNK_ROWS)
    return whole + (rest >= STEP_ROWS) + 1.0


def _attention(op: Attention, shard: Sharding, profile: CpuProfile) -> Seconds:
    """A context axis divides queries; each still meets the whole sequence."""
    tokens = shard.tokens / shard.tp * (1.0 if op.causal else 2.0)
    flops = op.flops(shard.seq_len) * tokens
    scores = op.num_heads * shard.seq_len * tokens
    times = (
        flops * profile.seconds[f"attention_{way}"] + scores * profile.seconds[f"score_{way}"]
        for way in ("forward", "backward")
    )
    return Seconds(*times)


def _convolution(op: Matmul, shard: Sharding, profile: CpuProfile) -> Seconds:
    flops = op.flops() * shard.tokens
    weights = op.parameters
    forward, backward = (
        flops * profile.seconds[f"convolution_flop_{way}"]
        + weights * profile.seconds[f"convolution_weight_{way}"]
        for way in ("forward", "backward")
    )
    return Seconds(forward, backward / 2, backward / 2)


def _elementwise(op: Elementwise, shard: Sharding, profile: CpuProfile) -> Seconds:
    split = (
        shard.tp
        if op.split in {"heads", "column", "row"} or shard.mode != "1d"
        else shard.sequence_split
    )
    kind, numbers = _kind(op, shard)
    return _of_kind(kind, numbers * shard.tokens / split, profile)


def _of_kind(kind: str, numbers: float, profile: CpuProfile) -> Seconds:
    return Seconds(
        numbers * profile.seconds[f"{kind}_forward"], numbers * profile.seconds[f"{kind}_backward"]
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
