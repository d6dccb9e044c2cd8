"""Seconds of operations on a processor core, from what the probe measured there (`plait.cluster.Host`).

No roofline: each kind of operation has its own measured seconds for a number, forward and backward. Ranks share the cores:
what one rank takes here is on a core of its own, and `step` sees to it that no more work is done at once than there are cores.
"""

from __future__ import annotations

from plait.cluster.host import Host
from plait.cost.machine import Machine
from plait.cost.operations import Attention, Elementwise
from plait.cost.sharding import Sharding

REFERENCE_LAUNCHES = 45.0
"""Kernels, forward and backward, of the block whose overhead the probe measured: a GPT's, as `kernels` counts them."""

ROTARY_PASSES, PERMUTE_PASSES, SHARDED_LOSS_PASSES = 5.0, 2.0, 2.0
"""Additions that as many numbers would take: two halves turned and joined; rows sorted by expert; a loss over ranges."""

LIKE = {"broadcast": "all_gather", "reduce": "reduce_scatter", "all_to_all": "all_gather", "shift": "send"}
"""Operations that the probe does not measure, and the one that moves bytes as they do."""


def launch_seconds(host: Host) -> float:
    """Python and autograd for one kernel."""
    return host.block_seconds / REFERENCE_LAUNCHES


def elementwise(op: Elementwise, shard: Sharding, host: Host) -> tuple[float, float]:
    """Seconds forward and backward."""
    split = shard.tp if op.split in {"heads", "column", "row"} or shard.mode != "1d" else shard.sequence_split
    kind, numbers = _kind(op, shard)
    numbers *= shard.tokens / split
    return numbers * host.seconds[f"{kind}_forward"], numbers * host.seconds[f"{kind}_backward"]


def _kind(op: Elementwise, shard: Sharding) -> tuple[str, float]:
    if "norm" in op.name:
        return "norm", op.writes
    if "activation" in op.name:
        return ("gate" if op.reads > op.writes else "activation"), op.writes
    if op.name == "loss":
        return "loss", op.writes / 2 * (SHARDED_LOSS_PASSES if shard.tp > 1 else 1.0)
    return "add", op.writes * {"rotary": ROTARY_PASSES, "permute": PERMUTE_PASSES}.get(op.name, 1.0)


def attention(op: Attention, shard: Sharding, host: Host) -> tuple[float, float]:
    """Seconds forward and backward. A context axis divides queries; each still meets the whole sequence."""
    flops = op.flops(shard.seq_len) * shard.tokens / shard.tp * (1.0 if op.causal else 2.0)
    return flops * host.seconds["attention_forward"], flops * host.seconds["attention_backward"]


def collective(machine: Machine, op: str, sent_bytes: float, size: int) -> float:
    """Seconds of a collective of `size` ranks, as work of each of them: measured with as many, whose cores were shared."""
    host = machine.host
    assert host is not None
    if not host.links:
        return sent_bytes / machine.link_bandwidth
    count = min((n for n in host.links if n >= size), default=max(host.links))
    latency, rate = host.links[count][LIKE.get(op, op)]
    return (latency + sent_bytes / rate) * min(1.0, machine.cores / count)


def shared_cores(machine: Machine, work: float, num_ranks: int) -> float:
    """The least seconds in which the cores do the `work` (seconds on one core) of `num_ranks` ranks."""
    return work / min(machine.cores, num_ranks)
