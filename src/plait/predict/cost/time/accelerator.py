"""An accelerator: a roofline for each operation, and links that work beside the device.

Gradients are reduced while backward runs, and what ZeRO gathers hides behind compute, as far as
`Efficiency` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.plan import Plan
from plait.predict.cost.model.operations import Block
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time import collectives, kernels
from plait.predict.cost.time.compute import ComputeSeconds
from plait.predict.cost.time.gradients import Buckets, DataMessages
from plait.predict.cost.time.groups import Group, group
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.messages import Message


@dataclass(frozen=True, eq=False, kw_only=True)
class Accelerator(Machine):
    """A machine that is described by its data sheet and `Efficiency`."""

    def block_seconds(
        self, block: Block, shard: Sharding, precision: str, compiled: bool
    ) -> ComputeSeconds:
        """The roofline of each operation."""
        return kernels.block_seconds(block, kernels.Setting(self, shard, precision, compiled))

    def collective_seconds(self, op: str, payload_bytes: float, ranks: Group) -> float:
        """The fastest algorithm on this topology."""
        return collectives.collective_seconds(self, op, payload_bytes, ranks)

    def message_seconds(self, message: Message, shard: Sharding) -> float:
        """The collective, as often as the message is sent."""
        ranks = group(message.size, message.stride, self.devices_per_node)
        return message.count * self.collective_seconds(message.op, message.payload_bytes, ranks)

    def sharded_seconds(
        self, data: DataMessages, buckets: Buckets, plan: Plan, compute: tuple[float, float]
    ) -> tuple[float, float]:
        """Messages behind the compute of a pass: the part that shows, and how much the rest slows
        the compute down.
        """
        parts = max(1, buckets.blocks)
        forward = collectives.messages_seconds(self, data.forward, parts)
        backward = collectives.messages_seconds(self, data.backward, parts)
        return self._shown(forward, compute[0], parts), self._shown(backward, compute[1], parts)

    def _shown(self, sent: float, compute: float, parts: int) -> float:
        hidden = min(sent * (1 - 1 / parts), self.efficiency.overlap * compute)
        return sent - hidden + self.efficiency.contention * hidden

    def reduction_seconds(
        self, data: DataMessages, buckets: Buckets, plan: Plan, hidden: float
    ) -> float:
        """The reduction that backward could not hide, the last bucket at least, and the gathering
        of updated weights.
        """
        parts = max(1, buckets.number)
        reduce = collectives.messages_seconds(self, data.reduce, parts)
        exposed = max(reduce - self.efficiency.overlap * hidden, reduce / parts)
        gather = collectives.messages_seconds(self, data.gather, parts)
        return exposed + (gather + collectives.messages_seconds(self, data.shared))

    def accumulation_seconds(self, numbers: float, width: float, micro_batches: int) -> float:
        """Each gradient is read and written; the first micro-batch has nothing to add to."""
        if micro_batches == 1:
            return 0.0
        return 2.0 * numbers * width / self.streaming_rate

    def copy_seconds(self, num_bytes: float) -> float:
        """At the rate of memory."""
        return num_bytes / self.streaming_rate

    def update_seconds(self, state_bytes: float, gradient_bytes: float = 0.0) -> float:
        """All state is read and written once."""
        return 3.0 * state_bytes / self.streaming_rate

    updates_in_one_pass = True

    def action_seconds(self, plan: Plan) -> float:
        """Nothing: the device works while the host prepares the next action."""
        return 0.0

    def shares_cores(self, num_ranks: int) -> bool:
        """Never: each rank has a device."""
        return False

    def shared_seconds(self, work: float, num_ranks: int) -> float:
        """Nothing: each rank has a device."""
        return 0.0
