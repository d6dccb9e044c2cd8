"""The rates that a cluster reaches in practice: data-sheet numbers times a few named efficiencies.

Every constant that was fitted stands in `Efficiency`, once for all devices, models and plans;
nothing else in the cost model is a fit. A cluster may carry measured rates of its own (a probe),
which then replace these.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from plait.cluster.host import Host

SUSTAINED = {
    "a100-40gb": 0.80, "a100-80gb": 0.80, "h100": 0.71, "h200": 0.67, "b200": 0.61, "gb200": 0.56, "gb300": 0.56,
    "l40s": 0.50, "t4": 0.37,
}  # fmt: skip
"""Median of measured bf16 products beyond 1e12 flops, of the peak rate: clocks fall when products
are large. From the public kernel measurements of ai-dynamo/aiconfigurator (gemm_perf, commit
095f58a). GB300: none, taken as GB200. T4: 24 of 65 TFLOP/s under its power cap of 70 W (NVIDIA
developer forum, thread 264462).
"""


PORTABLE_ATTENTION = {"h100": 0.5, "h200": 0.5, "b200": 0.5, "gb200": 0.5, "gb300": 0.5}
"""FlashAttention-2 over FlashAttention-3 and cuDNN where warp-group products exist (Shah et al.,
"FlashAttention-3", figure 5).
"""


@dataclass(frozen=True)
class Efficiency:
    """What real kernels and links reach of the data sheet. Fractions unless the name has a unit."""

    matmul: float = 0.95
    """Large matrix products inside training, of what the device sustains in benchmarks of single
    products.
    """
    matmul_depth: float = 32.0
    """Extra depth, in elements, that the start and end of a tile cost: a product of depth k runs at
    k / (k + this).
    """
    matmul_rows: float = 96.0
    """Extra rows that a product costs, in the same way: waves of tiles that are not full."""
    memory: float = 0.93
    """Streaming bandwidth of elementwise kernels, of the data sheet."""
    attention_forward: float = 0.7
    """Fused attention on long sequences, of the sustained rate, counting the causal half."""
    attention_backward: float = 0.8
    attention_half_length: float = 900.0
    """Sequence length at which fused attention reaches half of that."""
    link: float = 0.8
    """Bus bandwidth of large collectives inside a node, of the one-directional link rate."""
    network: float = 0.9
    """The same between nodes."""
    collective_seconds: float = 35e-6
    """Start of a reduce-scatter or all-gather inside a node (an all-reduce is two)."""
    attention_depth: float = 48.0
    """Extra width of a head that its exponentials cost: heads of width d run at d / (d + this)."""
    kernel_seconds: float = 3e-6
    """Start of a kernel on the device."""
    launch_seconds: float = 60e-6
    """Python, autograd and driver for each kernel on the host: small micro-batches wait for it."""
    call_seconds: float = 135e-6
    """The same for each collective."""
    eager_passes: float = 1.8
    """How often an elementwise operation that is not fused passes over memory, beside once when
    compiled.
    """
    overlap: float = 0.6
    """The part of backward (or of the neighbouring layer) behind which data-parallel communication
    can hide.
    """
    tail: float = 0.1
    """The part of a reduction that comes after the last backward whatever the overlap: the last
    bucket.
    """
    contention: float = 0.35
    """Slow-down of compute while a collective shares the device."""
    congestion: float = 0.12
    """Loss of network bandwidth for each doubling of the nodes that a collective spans."""
    step_seconds: float = 4e-3
    """Work that every step does once whatever the plan: data, clipping, bookkeeping."""


@dataclass(frozen=True, eq=False)
class Machine:
    """A cluster as the cost model sees it; SI units. Compared by identity: results are cached by
    machine.
    """

    name: str
    num_devices: int
    peak_flops: dict[str, float]
    memory_bytes: float
    memory_bandwidth: float
    devices_per_node: int
    link_bandwidth: float
    link_latency: float
    network_bandwidth: float
    """For each device."""
    network_latency: float
    price_per_hour: float = 0.0
    sustained: float = 0.72
    portable_attention: float = 1.0
    """Speed of a fused attention kernel written for older matrix units, of one written for this
    device.
    """
    efficiency: Efficiency = field(default_factory=Efficiency)
    is_cpu: bool = False
    host: Host | None = None
    """What the probe measured of a processor; then no efficiency above is used for its compute and
    its links.
    """

    @property
    def cores(self) -> int:
        """Ranks that compute at once on a processor; more of them share its cores."""
        return self.devices_per_node

    def matmul_rate(self, precision: str) -> float:
        """Flops a second of large matrix products."""
        return self.peak_flops[precision] * self.sustained * self.efficiency.matmul

    @property
    def streaming_rate(self) -> float:
        """Bytes a second of elementwise kernels."""
        return self.memory_bandwidth * self.efficiency.memory


MEASURED = Efficiency(
    matmul=0.8,
    matmul_depth=0.0,
    matmul_rows=0.0,
    memory=0.6,
    attention_forward=0.5,
    attention_backward=0.5,
    attention_half_length=0.0,
    attention_depth=0.0,
    link=1.0,
    network=1.0,
    collective_seconds=0.0,
    kernel_seconds=20e-6,
    launch_seconds=0.0,
    call_seconds=0.0,
    eager_passes=1.0,
    congestion=0.0,
    overlap=0.0,
    step_seconds=1e-3,
)
"""For rates that were measured on the machine itself, on products of one size and on copies. A
processor core that computes has no second engine that communicates, so nothing overlaps.
"""


def machine_of(cluster: Any, efficiency: Efficiency | None = None) -> Machine:
    """The machine of a `plait.cluster.Cluster`."""
    device = cluster.device
    measured = getattr(cluster.device, "is_cpu", False)
    chosen = efficiency or (MEASURED if measured else Efficiency())
    if cluster.host is not None and efficiency is None:
        chosen = replace(
            MEASURED, matmul=1.0, kernel_seconds=0.0, step_seconds=cluster.host.engine["step"]
        )
    return Machine(
        name=cluster.name,
        num_devices=cluster.num_devices,
        peak_flops=dict(device.flops),
        memory_bytes=device.memory_bytes,
        memory_bandwidth=device.memory_bandwidth,
        devices_per_node=cluster.node.devices,
        link_bandwidth=cluster.node.bandwidth,
        link_latency=cluster.node.latency_seconds,
        network_bandwidth=cluster.network.bandwidth,
        network_latency=cluster.network.latency_seconds,
        price_per_hour=device.price_per_hour,
        sustained=sustained_fraction(device),
        portable_attention=PORTABLE_ATTENTION.get(device.name, 1.0),
        efficiency=chosen,
        is_cpu=measured,
        host=cluster.host,
    )


def sustained_fraction(device: Any) -> float:
    """What long runs of large matrix products hold of the peak rate: measured, or derived from the
    best single product.
    """
    if device.is_cpu:
        return 1.0
    if device.name in SUSTAINED:
        return SUSTAINED[device.name]
    return 0.88 * device.matmul_efficiency if device.matmul_efficiency else 0.72
