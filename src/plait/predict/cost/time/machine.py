"""The machine of an estimate: the rates that a cluster reaches in practice, for the questions of
the cost model.

They are data-sheet numbers times a few named efficiencies. Every fitted constant stands in
`Efficiency`, once for all devices, models and plans. A cluster may carry measured rates of its own
(a probe), which then replace these. An `Accelerator` and a `Processor` answer the questions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from plait.plan import Plan
from plait.plan.precisions import PRECISION
from plait.predict.cost.memory.rules import MemoryRules
from plait.predict.cost.model.operations import Block
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.compute import ComputeSeconds
from plait.predict.cost.time.gradients import Buckets, DataMessages
from plait.predict.cost.time.groups import Group
from plait.predict.cost.time.messages import Message


@dataclass(frozen=True)
class Efficiency:
    """Parts of the data sheet that real kernels and links reach. Fractions unless the name has a
    unit.
    """

    matmul: float = 0.96
    """Large matrix products in a step, of what the device sustains with one product over and over.
    """
    matmul_depth: float = 96.0
    """Extra depth, in elements, that the start and end of a tile cost. A product of depth k runs at
    k / (k + this).
    """
    matmul_rows: float = 80.0
    """Extra rows that a product costs, in the same way: waves of tiles that are not full."""
    memory: float = 0.93
    """Streaming bandwidth of elementwise kernels, of the data sheet."""
    attention_forward: float = 1.06
    """Fused attention on long sequences, of the sustained rate, counting the causal half."""
    attention_backward: float = 0.88
    attention_seconds: float = 20e-6
    """Start of a fused attention: its first tiles walk the sequence before all units have work."""
    attention_half_length: float = 750.0
    """Sequence length at which fused attention reaches half of that."""
    link: float = 0.8
    """Bus bandwidth of large collectives inside a node, of the one-directional link rate."""
    network: float = 0.9
    """Bus bandwidth of large collectives between nodes, of the one-directional link rate."""
    collective_seconds: float = 0.0
    """Start of a collective in the midst of a step, beyond that of one in a row of its like."""
    attention_depth: float = 33.0
    """Extra width of a head that its exponentials cost: heads of width d run at d / (d + this)."""
    kernel_seconds: float = 3e-6
    """Start of a kernel on the device."""
    launch_seconds: float = 60e-6
    """Python, autograd and driver for each kernel on the host: small micro-batches wait for it."""
    call_seconds: float = 135e-6
    """Python, autograd and driver for each collective on the host."""
    eager_passes: float = 2.2
    """How often an elementwise operation that is not fused passes over memory, beside once when
    compiled.
    """
    overlap: float = 0.6
    """The part of backward (or of the neighbouring layer) behind which data-parallel communication
    can hide.
    """
    contention: float = 0.5
    """Slow-down of compute while a collective shares the device."""
    congestion: float = 0.12
    """Loss of network bandwidth for each doubling of the nodes that a collective spans."""
    step_seconds: float = 4e-3
    """Work that every step does once whatever the plan: data, clipping, bookkeeping."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Machine(ABC):
    """A cluster as the cost model sees it; SI units. Compared by identity: results are cached by
    machine.
    """

    name: str
    num_devices: int
    peak_flops: dict[str, float]
    memory: MemoryRules
    memory_bandwidth: float
    devices_per_node: int
    link_bandwidth: float
    link_latency: float
    network_bandwidth: float
    """For each device."""
    network_latency: float
    price_per_hour: float = 0.0
    power_watts: float = 0.0
    bar_width: float = 1.0
    """Width of the time bars, of the usual one."""
    sustained: float = 0.72
    rounded_sustained: float = 0.66
    """Part of the peak that products of eight bits and fewer hold."""
    attention: dict[str, float]
    """Speed of each generation of attention kernels, of those for asynchronous products on devices
    that have them.
    """
    cool: float = 0.0
    """How much faster a short product is by itself: clocks fall while this device is at work."""
    collective_start: float = 8.4e-6
    """Seconds that a collective takes whatever it moves."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    default_precision: str = "bf16"
    network_congestion: float | None = None
    """Loss of network bandwidth of this cluster for each doubling of the nodes of a collective.
    None takes that of clusters in general, `Efficiency.congestion`.
    """
    network_step: float = 0.0
    """Seconds that each step of a ring over nodes takes at least. Ports pass the pieces of all
    ranks on, one after another.
    """
    pair_bandwidth: float = 0.0
    """Bytes a second between two devices of a node alone, where the node says so; else 0."""
    pair: float = 1.0
    """Rate of two devices alone where the node does not say so, of `link_bandwidth`."""
    switch_sums: bool = False
    """Whether the switch of a node adds up what its devices reduce."""

    @property
    def congestion(self) -> float:
        """Loss of network bandwidth for each doubling of the nodes."""
        if self.network_congestion is None:
            return self.efficiency.congestion
        return self.network_congestion

    def node_rate(self, ranks: int) -> float:
        """Bytes a second and direction that each of so many devices of a node sends in a ring.

        A host bridge is shared by all; a mesh has more links the more devices take part. Between
        two devices and all of them, logarithms of rate and number make a line.
        """
        if not self.pair_bandwidth:
            return self.link_bandwidth * (self.pair if ranks == 2 else 1.0)
        if self.devices_per_node <= 2:
            return self.link_bandwidth
        part = math.log2(max(2, ranks) / 2) / math.log2(self.devices_per_node / 2)
        ratio = self.link_bandwidth / self.pair_bandwidth
        return self.pair_bandwidth * ratio ** min(1.0, part)

    def sums_in_switch(self, ranks: Group) -> bool:
        """Whether an all-reduce of these ranks of a node is added up by its switch."""
        return self.switch_sums and ranks.size > 2

    @property
    def cores(self) -> int:
        """Ranks that compute at once on a processor; more of them share its cores."""
        return self.devices_per_node

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory of one device."""
        return self.memory.total_bytes

    def matmul_rate(self, precision: str) -> float:
        """Flops a second of large matrix products."""
        is_rounded = PRECISION[precision].rounds_products
        held = self.rounded_sustained if is_rounded else self.sustained
        return self.peak_flops[precision] * held * self.efficiency.matmul

    def matrix_rate(self) -> float:
        """Flops a second of an optimizer's products of whole matrices, in bf16 where it is had."""
        return self.matmul_rate("bf16" if "bf16" in self.peak_flops else "float32")

    @property
    def streaming_rate(self) -> float:
        """Bytes a second of elementwise kernels."""
        return self.memory_bandwidth * self.efficiency.memory

    @abstractmethod
    def block_seconds(
        self, block: Block, shard: Sharding, precision: str, compiled: bool
    ) -> ComputeSeconds:
        """The compute of one block for one micro-batch on one rank."""

    @abstractmethod
    def collective_seconds(self, op: str, payload_bytes: float, ranks: Group) -> float:
        """Seconds of one collective; `payload_bytes` as in `plait.comm.transitions.bytes_sent`."""

    @abstractmethod
    def message_seconds(self, message: Message, shard: Sharding) -> float:
        """Seconds of one message inside a block."""

    @abstractmethod
    def sharded_seconds(
        self, data: DataMessages, buckets: Buckets, plan: Plan, compute: tuple[float, float]
    ) -> tuple[float, float]:
        """Seconds that ZeRO-2 and -3 add to each micro-batch, forward and backward, after overlap
        with the rank's `compute` forward and backward.
        """

    @abstractmethod
    def reduction_seconds(
        self, data: DataMessages, buckets: Buckets, plan: Plan, hidden: float
    ) -> float:
        """Seconds of reducing gradients and gathering weights after the last backward; `hidden`
        seconds of it fit behind that.
        """

    @abstractmethod
    def accumulation_seconds(self, numbers: float, width: float, micro_batches: int) -> float:
        """Seconds of adding so many gradients, `width` bytes each, to those before them."""

    @abstractmethod
    def copy_seconds(self, num_bytes: float) -> float:
        """Seconds of gradients' way to the place where they are added up, which reads and writes
        so many bytes.
        """

    @abstractmethod
    def update_seconds(self, state_bytes: float, gradient_bytes: float = 0.0) -> float:
        """Seconds of clipping and updating the weights whose optimizer state takes
        `state_bytes`.
        """

    updates_in_one_pass: ClassVar[bool] = False
    """Whether plait's kernel for updates of one rank runs there."""

    @abstractmethod
    def action_seconds(self, plan: Plan) -> float:
        """Seconds of the engine itself in each action of a stage."""

    @abstractmethod
    def shares_cores(self, num_ranks: int) -> bool:
        """Whether so many ranks are more than compute at once."""

    @abstractmethod
    def shared_seconds(self, work: float, num_ranks: int) -> float:
        """The least seconds in which the machine does the `work` (seconds on one core) of ranks
        that share its cores.
        """
