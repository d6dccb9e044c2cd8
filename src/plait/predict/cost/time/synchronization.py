"""Synchronisation overhead of ranks on the cores of a processor, from the measurements of a probe.

A core that computes communicates itself, so nothing is hidden, and all is the work of a rank. A
collective has a latency and a rate. In the engine a rank does more around it (hooks, copies, caches
that are cold when it goes on). That is a loss for each meeting, of a few kinds: see
`plait.predict.probe.meetings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from plait.cluster.cpu_profile import CpuProfile
from plait.comm.transitions import bytes_sent
from plait.plan import Plan
from plait.plan.facts import STRATEGIES
from plait.predict.cost.model.operations import Attention, Block
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.gradients import Buckets
from plait.predict.cost.time.messages import Message

NUMBER_BYTES = 4
"""Bytes of a gradient: the probe measures in float32."""

COLLECTS = ("all_gather", "broadcast")
"""Operations that gather weights in place once they are updated."""

LIKE = {
    "broadcast": "all_gather",
    "reduce": "reduce_scatter",
    "all_to_all": "all_gather",
    "shift": "send",
}
"""Operations that the probe does not measure, and the one that moves bytes as they do."""


class Measured(Protocol):
    """A processor that was measured, as far as these formulas ask it."""

    @property
    def profile(self) -> CpuProfile:
        """The measurements."""
        ...

    @property
    def cores(self) -> int:
        """Cores of the measured machine: the ranks that compute at once."""
        ...

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second, where no collective was measured."""
        ...


def ring(block: Block, shard: Sharding, machine: Measured) -> float:
    """Seconds of the steps of ring attention beside the work, forward and backward."""
    if shard.cp == 1 or shard.context != "ring":
        return 0.0
    steps = ring_steps(shard.cp, shard.seq_len, machine.profile.met_at_once)
    cores = sum(isinstance(op, Attention) for op in block.operations)
    return meeting_seconds(machine, "visit", shard.cp, shard.ranks) * steps * cores


@lru_cache(maxsize=256)
def ring_steps(size: int, seq_len: int, met_at_once: float) -> float:
    """How often a rank of a ring of `size`, on average, attends to others' keys or waits for them,
    both ways.

    The rounds are those of `plait.parallel.context.ring_schedule`. There are as many steps as bring
    `met_at_once` keys. In each is at most one visit to the ranks before and one to those after.
    Forward waits once, for all to expose their keys. Backward waits once, too, and once a round for
    gradients to come home.
    """
    steps = max(1, int(met_at_once // max(1, seq_len // size)))
    firsts = range(1, size, steps)
    last = [min(first + steps, size) - 1 for first in firsts]
    visits = sum(
        (rank >= first) + (rank < stop)
        for rank in range(size)
        for first, stop in zip(firsts, last, strict=True)
    )
    attended = 1 + visits / size  # to this rank's keys first
    return 2 * attended + 2 + len(firsts)


def collective(
    machine: Measured,
    op: str,
    sent_bytes: float,
    size: int,
    calls: float = 1.0,
    *,
    staged: bool = False,
) -> float:
    """Seconds of a rank's processor in `calls` collectives of `size` ranks that send so much in
    all. `staged`: tensors that peers cannot read where they lie.
    """
    profile = machine.profile
    if not profile.links:
        return sent_bytes / machine.link_bandwidth
    latency, rate = _link(profile, op, size, staged)
    return calls * latency + sent_bytes / rate


def reduction(
    machine: Measured, messages: Sequence[Message], buckets: Buckets, plan: Plan
) -> float:
    """Seconds of what a plan's data axis sends: each message is of as many `buckets`. A ring is
    written out in messages.
    """
    seconds = 0.0
    profile = machine.profile
    name = "unit" if STRATEGIES[plan.dp.strategy].shards_parameters else "bucket"
    size = plan.dp.size * plan.cp.size
    each_tensor = meeting_seconds(machine, name, size, plan.world_size)
    for message in messages:
        sent = message.sent_bytes
        calls = message.count * message.share * buckets.number
        if plan.dp.strategy == "ring" and message.op == "all_reduce":
            steps = 2.0 * (message.size - 1)
            added = (
                sent / NUMBER_BYTES * profile.seconds["add_forward"]
            )  # what comes is added, or copied
            seconds += 2 * collective(machine, "send", sent, message.size, steps * calls) + added
        else:
            seconds += collective(machine, message.op, sent, message.size, calls)
        if name == "unit" or message.op not in COLLECTS:
            seconds += message.count * message.share * buckets.tensors * each_tensor
    return seconds


def meeting(message: Message, shard: Sharding) -> str:
    """Kind of synchronisation of a message inside a block; "" where the steps of a ring are counted
    by themselves (`ring`).
    """
    if message.axis == "cp":
        return "" if message.op == "shift" else "turn"
    return "call" if shard.mode == "1d" or message.axis != "tp" else "grid"


def inside_block(machine: Measured, message: Message, shard: Sharding) -> float:
    """Seconds of one message in the midst of a block, with all that the engine does for it."""
    sent_bytes = bytes_sent(message.op, round(message.payload_bytes), message.size)
    name = meeting(message, shard)
    alone = collective(machine, message.op, sent_bytes, message.size, 0.0, staged=True)
    size = shard.tp if name == "grid" else message.size
    return alone + (meeting_seconds(machine, name, size, shard.ranks) if name else 0.0)


def meeting_seconds(machine: Measured, name: str, size: int, ranks: int) -> float:
    """Synchronisation overhead of one rank among `size`, beside the work, where so many `ranks`
    share the cores.

    It grows linearly. Where each rank has a core it grows with the ranks that meet. Where ranks
    share cores it grows with the ranks that share, since a waiting rank comes back to foreign
    caches. What was measured with one number only grows as a collective on a line does.
    """
    profile = machine.profile
    crowded = ranks > machine.cores
    measured = sorted(profile.meetings[name].items())
    if not measured:
        return 0.0
    alike = [one for one in measured if (one[0] > machine.cores) == crowded] or measured
    if len(measured) == 1 and name != "call":
        few, first = measured[0]
        return (
            first
            * meeting_seconds(machine, "call", size, ranks)
            / max(meeting_seconds(machine, "call", few, few), 1e-9)
        )
    if len(alike) == 1:
        return alike[0][1]
    number = ranks if crowded else size
    index = next((i for i, (count, _) in enumerate(alike) if count >= number), len(alike) - 1)
    (few, first), (many, second) = alike[max(index - 1, 0)], alike[max(index, 1)]
    return max(0.0, first + max(0.0, second - first) * (number - few) / (many - few))


def _link(profile: CpuProfile, op: str, size: int, staged: bool) -> tuple[float, float]:
    count = min((n for n in profile.links if n >= size), default=max(profile.links))
    op = LIKE.get(op, op)
    return profile.links[count][f"staged_{op}" if staged and op != "send" else op]
