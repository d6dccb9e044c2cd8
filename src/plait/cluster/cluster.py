"""Where a plan runs: frozen records of a device, its node, its network, and how many there are. SI
units throughout.

Bandwidths are per device and per direction, because that is what one rank of a collective can send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from plait.errors import ClusterError

if TYPE_CHECKING:
    from plait.cluster.host import Host


MOST_DEVICES: Final = 10_000_000


@dataclass(frozen=True)
class Device:
    """One accelerator, or one processor core that holds a rank.

    `flops`: peak flop/s by precision (`float32`, `bf16`, `float64`), dense; `memory_bandwidth`:
    bytes/s; `matmul_efficiency`: the share of the bf16 peak that large matrix products were
    measured to reach, None if unknown; `price_per_hour`: US dollars, only a default to compare
    plans by.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    price_per_hour: float = 0.0
    matmul_efficiency: float | None = None
    is_cpu: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.memory_bandwidth, self.price_per_hour))

    def __reduce__(
        self,
    ) -> tuple[Any, ...]:  # a read-only mapping does not pickle; the plain one does
        rest = (
            self.memory_bytes,
            self.memory_bandwidth,
            self.price_per_hour,
            self.matmul_efficiency,
            self.is_cpu,
        )
        return Device, (self.name, dict(self.flops), *rest)

    def peak_flops(self, precision: str = "bf16") -> float:
        """Peak flop/s of dense matrix products; raises `ClusterError` for a precision that the
        device does not state.
        """
        if precision not in self.flops:
            raise ClusterError(
                f"{self.name}: no peak is known for precision {precision}, only for {', '.join(self.flops)}; "
                "give [device] peak_tflops in a cluster file"
            )
        return self.flops[precision]


@dataclass(frozen=True)
class Node:
    """Devices that share a fast link: `bandwidth` bytes/s per device and direction."""

    devices: int
    bandwidth: float
    latency_seconds: float


@dataclass(frozen=True)
class Network:
    """The links between nodes: `bandwidth` bytes/s per device and direction."""

    bandwidth: float
    latency_seconds: float


@dataclass(frozen=True)
class Cluster:
    """`num_devices` equal devices in nodes of `node.devices`, joined by a network; `name` is what
    it was read from.
    """

    name: str
    device: Device
    node: Node
    network: Network
    num_devices: int
    host: Host | None = None
    """What was measured of a processor beside a cluster's numbers."""

    @staticmethod
    def parse(text: str, probe_path: str | Path | None = None) -> Cluster:
        """A preset, `PRESETxCOUNT`, the path of a TOML file, or `local` (this machine, as `plait
        probe` measured it).

        Raises `ClusterError` with the nearest preset, or with the key of a number that cannot be.
        """
        from plait.cluster.parse import parse_cluster

        return parse_cluster(text, probe_path)

    @staticmethod
    def local(probe: Mapping[str, Any] | None) -> Cluster:
        """This machine, from the measurements of `plait probe`; raises `ClusterError` when there
        are none.
        """
        from plait.cluster.local import cluster_of_probe

        return cluster_of_probe(probe)

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may be partly filled."""
        return -(-self.num_devices // self.node.devices)

    @property
    def price_per_hour(self) -> float:
        """US dollars an hour for all devices."""
        return self.device.price_per_hour * self.num_devices

    def with_num_devices(self, num_devices: int) -> Cluster:
        """The same kind of machines, another number of devices."""
        if num_devices < 1:
            raise ClusterError(
                f"{self.name}: a cluster needs at least one device, not {num_devices}"
            )
        if num_devices > MOST_DEVICES:
            raise ClusterError(
                f"{self.name}: a cluster has {MOST_DEVICES} devices at most, not {num_devices}"
            )
        return replace(self, num_devices=num_devices)
