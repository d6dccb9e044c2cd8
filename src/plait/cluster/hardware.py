"""Records of hardware: a device, its node, its network, and how many there are. SI units
throughout.

Bandwidths are per device and per direction, because that is what one rank of a collective can send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from plait.cluster.calibration import Calibration
from plait.cluster.cpu_profile import CpuProfile
from plait.errors import ClusterError


@dataclass(frozen=True)
class Device:
    """One accelerator, or one processor core that holds a rank.

    `flops`: peak flop/s by precision (`float32`, `bf16`, `float64`, `fp8` and its like where the
    device has them), dense. `memory_bandwidth`: bytes/s. `matmul_efficiency`: the measured share of
    the bf16 peak in large matrix products, None if unknown. `price_per_hour`: US dollars, only a
    default to compare plans by. `power_watts`: that of the board, 0 where it is unknown.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    price_per_hour: float = 0.0
    matmul_efficiency: float | None = None
    is_cpu: bool = False
    power_watts: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.memory_bandwidth, self.price_per_hour))

    def __reduce__(
        self,
    ) -> tuple[Any, ...]:  # a read-only mapping does not pickle; the plain one does
        other_fields = (
            self.memory_bytes,
            self.memory_bandwidth,
            self.price_per_hour,
            self.matmul_efficiency,
            self.is_cpu,
            self.power_watts,
        )
        return Device, (self.name, dict(self.flops), *other_fields)

    def peak_flops(self, precision: str = "bf16") -> float:
        """Peak flop/s of dense matrix products; raises `ClusterError` for a precision that the
        device does not state.
        """
        if precision not in self.flops:
            raise ClusterError(
                f"{self.name}: no peak is known for precision {precision}, only for "
                f"{', '.join(self.flops)}; "
                "give [device] peak_tflops in a cluster file"
            )
        return self.flops[precision]


@dataclass(frozen=True)
class Node:
    """Devices that share a fast link: `bandwidth` bytes/s per device and direction.

    `pair_bandwidth` is that of two devices alone where it was measured, else 0. A mesh has fewer
    links between two. A host bridge is not shared by so many.
    """

    devices: int
    bandwidth: float
    latency_seconds: float
    pair_bandwidth: float = 0.0


@dataclass(frozen=True)
class Network:
    """The links between nodes: `bandwidth` bytes/s per device and direction.

    `congestion` is the loss of bandwidth for each doubling of the nodes that talk at once. It is 0
    where the network is not oversubscribed, None where it is unknown. Steps of a ring over nodes
    follow each other in `step_seconds` at best.
    """

    bandwidth: float
    latency_seconds: float
    congestion: float | None = None
    step_seconds: float = 0.0


class Hardware(NamedTuple):
    """The parts of a cluster, as a preset, a file or a probe gives them; see
    `plait.cluster.Cluster`.
    """

    name: str
    device: Device
    node: Node
    network: Network
    num_devices: int
    profile: CpuProfile | None = None
    calibration: Calibration | None = None
