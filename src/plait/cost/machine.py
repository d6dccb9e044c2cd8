"""The rates that a cluster reaches in practice: data-sheet numbers times a few named efficiencies.

Every constant that was fitted stands in `Efficiency`, once for all devices, models and plans; nothing else in the cost
model is a fit. A cluster may carry measured rates of its own (a probe), which then replace these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Efficiency:
    """What real kernels and links reach of the data sheet. Fractions unless the name has a unit."""

    matmul: float = 0.76
    """Large bf16 matrix products inside training, of the peak rate (library benchmarks: 0.70 to 0.80)."""
    matmul_depth: float = 64.0
    """Extra depth, in elements, that the start and end of a tile cost: a product of depth k runs at k / (k + this)."""
    memory: float = 0.75
    """Streaming bandwidth of elementwise kernels, of the data sheet."""
    attention_forward: float = 0.55
    """Fused attention on long sequences, of the peak rate, counting the causal half."""
    attention_backward: float = 0.45
    attention_half_length: float = 900.0
    """Sequence length at which fused attention reaches half of that."""
    link: float = 0.75
    """Bus bandwidth of large collectives inside a node, of the one-directional link rate."""
    network: float = 0.80
    """The same between nodes."""
    collective_seconds: float = 20e-6
    """Start of a reduce-scatter or all-gather inside a node (an all-reduce is two)."""
    kernel_seconds: float = 3e-6
    """Start of a kernel."""
    eager_passes: float = 1.6
    """How often an elementwise operation that is not fused passes over memory, beside once when compiled."""
    overlap: float = 0.9
    """The part of backward (or of the neighbouring layer) behind which data-parallel communication can hide."""
    contention: float = 0.10
    """Slow-down of compute while a collective shares the device."""
    congestion: float = 0.05
    """Loss of network bandwidth for each doubling of the nodes that a collective spans."""
    step_seconds: float = 5e-3
    """Work that every step does once whatever the plan: data, clipping, bookkeeping."""
    jitter: float = 0.01
    """Wait for the slowest rank for each doubling of the ranks that meet in a step."""


@dataclass(frozen=True, eq=False)
class Machine:
    """A cluster as the cost model sees it; SI units. Compared by identity: results are cached by machine."""

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
    efficiency: Efficiency = field(default_factory=Efficiency)
    is_cpu: bool = False

    def matmul_rate(self, precision: str) -> float:
        """Flops a second of large matrix products."""
        return self.peak_flops[precision] * self.efficiency.matmul

    @property
    def streaming_rate(self) -> float:
        """Bytes a second of elementwise kernels."""
        return self.memory_bandwidth * self.efficiency.memory


def machine_of(cluster: Any) -> Machine:
    """The machine of a `plait.cluster.Cluster`."""
    raise NotImplementedError(str(cluster))
