"""Seconds of a block on a processor core, from what the probe measured there (`plait.cluster.Host`).

No roofline: each kind of operation has its own measured seconds for a number, forward and backward, and what Python and
autograd take is in the way, as nothing runs beside it. Ranks share the cores: what one rank takes here is on a core of its
own, and `step` sees to it that no more work is done at once than there are cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.cluster.host import Host
from plait.comm.transitions import bytes_sent
from plait.cost.machine import Machine
from plait.cost.operations import Attention, Block, Elementwise, Matmul, Operation
from plait.cost.shapes import products
from plait.cost.sharding import Sharding

if TYPE_CHECKING:
    from plait.cost.messages import Message

REFERENCE_LAUNCHES = 45.0
"""Kernels, forward and backward, of the GPT block whose overhead the probe measured; others are counted in the same way."""

FORWARD_SHARE = 0.4
"""Of what Python and autograd take for a block."""

SHARDED_LOSS_PASSES = 2.0
"""A loss over ranges of the vocabulary, of one over all of it."""

LIKE = {"broadcast": "all_gather", "reduce": "reduce_scatter", "all_to_all": "all_gather", "shift": "send"}
"""Operations that the probe does not measure, and the one that moves bytes as they do."""


@dataclass(frozen=True)
class Seconds:
    """Of one operation: forward, and the two halves of its backward."""

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    def plus(self, other: Seconds) -> Seconds:
        """The sum."""
        return Seconds(self.forward + other.forward, self.input_grad + other.input_grad, self.weight_grad + other.weight_grad)


def operation(op: Operation, shard: Sharding, host: Host, *, by_rule: bool = True) -> Seconds:
    """What an operation takes on one rank and micro-batch. `by_rule`: layers may take the quicker library (see `product`)."""
    if isinstance(op, Matmul):
        if op.convolution:
            return _convolution(op, shard, host)
        made = products(op, shard)
        share = made.outputs / op.outputs  # query, key and value are a product each
        parts = [replace(made, outputs=share * part) for part in op.parts] or [made]
        ways = zip(*(part.each() for part in parts), strict=True)
        return Seconds(*(made.copies * sum(product(host, m, n, k, by_rule=by_rule) for m, n, k in way) for way in ways))
    if isinstance(op, Attention):
        return _attention(op, shard, host)
    if isinstance(op, Elementwise):
        return _elementwise(op, shard, host)
    return _of_kind("lookup", shard.tokens * op.width, host)


def product(host: Host, m: float, n: float, k: float, *, by_rule: bool = True) -> float:
    """One `m x k @ k x n`, as `plait.products` makes it where it holds (`by_rule`), else as torch does."""
    flops, numbers, rule = 2.0 * m * n * k, m * n + n * k + m * k, host.rule
    if by_rule and rule is not None and m >= rule["rows"] and m * n * k >= rule["multiplications"]:
        start = host.seconds["product_start"]
        return start + flops * host.seconds["product_flop"] + numbers * host.seconds["product_number"]
    return flops * host.seconds["plain_flop"] + numbers * host.seconds["plain_number"]


def overhead(block: Block, launches: float, host: Host, remat: str = "none") -> float:
    """Seconds of Python and autograd for one block and micro-batch, forward and backward."""
    attention = any(isinstance(op, Attention) for op in block.operations)
    if not attention:
        reference = host.blocks["gpt"]
        return launches / REFERENCE_LAUNCHES * reference[remat if block.name not in {"head", "embedding", "stem"} else "none"]
    if block.num_experts:
        return host.blocks["experts"][remat]
    return host.blocks["llama" if any(op.name == "rotary" for op in block.operations) else "gpt"][remat]


def dispatched(host: Host) -> float:
    """How many times as long Python takes while selective recomputation looks at every operator."""
    return max(1.0, host.blocks["gpt"]["selective"] / max(host.blocks["gpt"]["none"], 1e-9))


def experts(block: Block, shard: Sharding, host: Host) -> float:
    """The same of the experts that a rank holds, beside those of the block that the probe measured."""
    from_probe = 2
    return host.engine["expert"] * max(0.0, block.num_experts / shard.ep - from_probe) if block.num_experts else 0.0


def ring(block: Block, shard: Sharding, host: Host) -> float:
    """The same of the steps of ring attention, forward and backward."""
    if shard.cp == 1 or shard.context != "ring":
        return 0.0
    return meeting_seconds(host, "visit", shard.ranks) * shard.cp * sum(isinstance(op, Attention) for op in block.operations)


def collective(machine: Machine, op: str, sent_bytes: float, size: int) -> float:
    """Seconds of a collective of `size` ranks, as work of each of them: measured with as many, whose cores were shared."""
    host = machine.host
    assert host is not None
    if not host.links:
        return sent_bytes / machine.link_bandwidth
    count = min((n for n in host.links if n >= size), default=max(host.links))
    latency, rate = host.links[count][LIKE.get(op, op)]
    return (latency + sent_bytes / rate) * min(1.0, machine.cores / count)


def inside_block(machine: Machine, message: Message, ranks: int, name: str) -> float:
    """The same in the midst of a block, where it was measured (`name`) with all that the engine does for it, among `ranks` on
    the machine. The steps of a ring are counted by themselves (`ring`): only their bytes are left."""
    host = machine.host
    assert host is not None
    sent_bytes = bytes_sent(message.op, round(message.payload_bytes), message.size)
    if not host.links:
        return sent_bytes / machine.link_bandwidth
    count = min((n for n in host.links if n >= message.size), default=max(host.links))
    bytes_alone = sent_bytes / host.links[count][LIKE.get(message.op, message.op)][1] * min(1.0, machine.cores / count)
    return bytes_alone + (meeting_seconds(host, name, ranks) if name else 0.0)


def meeting_seconds(host: Host, name: str, ranks: int) -> float:
    """What a rank loses when it meets others, beside the work, where so many `ranks` share the cores: in a straight line from
    the two numbers that were measured, or one that grows as a collective on a line does."""
    known = sorted(host.meetings[name].items())
    if not known:
        return 0.0
    few, first = known[0]
    if len(known) > 1:
        many, second = known[1]
        return first + max(0.0, second - first) * max(0, ranks - few) / (many - few)
    if name == "call":
        return first
    return first * max(1.0, meeting_seconds(host, "call", ranks) / max(meeting_seconds(host, "call", few), 1e-9))


def shared_cores(machine: Machine, work: float, num_ranks: int) -> float:
    """The least seconds in which the cores do the `work` (seconds on one core) of `num_ranks` ranks."""
    return work / min(machine.cores, num_ranks)


def _attention(op: Attention, shard: Sharding, host: Host) -> Seconds:
    """A context axis divides queries; each still meets the whole sequence."""
    tokens = shard.tokens / shard.tp * (1.0 if op.causal else 2.0)
    flops, scores = op.flops(shard.seq_len) * tokens, op.num_heads * shard.seq_len * tokens
    times = (
        flops * host.seconds[f"attention_{way}"] + scores * host.seconds[f"score_{way}"] for way in ("forward", "backward")
    )
    return Seconds(*times)


def _convolution(op: Matmul, shard: Sharding, host: Host) -> Seconds:
    flops, weights = op.flops() * shard.tokens, op.parameters
    forward, backward = (
        flops * host.seconds[f"convolution_flop_{way}"] + weights * host.seconds[f"convolution_weight_{way}"]
        for way in ("forward", "backward")
    )
    return Seconds(forward, backward / 2, backward / 2)


def _elementwise(op: Elementwise, shard: Sharding, host: Host) -> Seconds:
    split = shard.tp if op.split in {"heads", "column", "row"} or shard.mode != "1d" else shard.sequence_split
    kind, numbers = _kind(op, shard)
    return _of_kind(kind, numbers * shard.tokens / split, host)


def _of_kind(kind: str, numbers: float, host: Host) -> Seconds:
    return Seconds(numbers * host.seconds[f"{kind}_forward"], numbers * host.seconds[f"{kind}_backward"])


def _kind(op: Elementwise, shard: Sharding) -> tuple[str, float]:
    """How the probe calls an operation, and of how many numbers a token it is."""
    if "norm" in op.name:
        if op.split == "none":  # of a convolution, with its activation
            return "group", op.writes / 2
        return "norm" if op.statistics > 1 else "rms", op.writes
    if "activation" in op.name:
        return ("gate" if op.reads > op.writes else "relu" if op.name == "activation" else "activation"), op.writes
    if op.name == "loss":
        return "loss", op.writes / 2 * (SHARDED_LOSS_PASSES if shard.tp > 1 else 1.0)
    return (op.name if op.name in {"rotary", "permute"} else "add"), op.writes
