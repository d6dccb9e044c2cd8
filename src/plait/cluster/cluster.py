"""Where a plan runs: devices in nodes, joined by a network, read from a preset, a file or a probe.

The parts are in `plait.cluster.hardware`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from plait.cluster.bounds import MOST_DEVICES
from plait.cluster.calibration import Calibration
from plait.cluster.cpu_profile import CpuProfile
from plait.cluster.hardware import Device, Network, Node
from plait.cluster.local import hardware_of_probe
from plait.cluster.parse import parse_cluster
from plait.cluster.products import ProductTable
from plait.errors import ClusterError
from plait.toml import is_file
from plait.values import JsonMapping


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
    profile: CpuProfile | None = None
    """Measurements of a processor, beside the numbers above."""
    calibration: Calibration | None = None
    """Factors from steps that were measured on it."""

    @staticmethod
    def parse(text: str, probe_path: str | Path | None = None) -> Cluster:
        """A preset, `PRESETxCOUNT`, the path of a TOML file, or `local` (this machine, as `plait
        probe` measured it).

        Raises `ClusterError` with the nearest preset, or with the key of a number that cannot be.
        """
        return Cluster(*parse_cluster(text, probe_path))

    @staticmethod
    def local(probe: JsonMapping | None) -> Cluster:
        """This machine, from the measurements of `plait probe`; raises `ClusterError` when there
        are none.
        """
        return Cluster(*hardware_of_probe(probe))

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may be partly filled."""
        return -(-self.num_devices // self.node.devices)

    @property
    def price_per_hour(self) -> float:
        """US dollars an hour for all devices."""
        return self.device.price_per_hour * self.num_devices

    def with_num_devices(self, num_devices: int) -> Cluster:
        """The cluster with so many devices of the same kind. Raises `ClusterError` for none or too
        many.
        """
        if num_devices < 1:
            raise ClusterError(
                f"{self.name}: a cluster needs at least one device, not {num_devices}"
            )
        if num_devices > MOST_DEVICES:
            raise ClusterError(
                f"{self.name}: a cluster has {MOST_DEVICES} devices at most, not {num_devices}"
            )
        return replace(self, num_devices=num_devices)

    def how_to_have(self, num_devices: int) -> str:
        """The words that tell a user how to have so many devices of the same kind."""
        if is_file(self.name):
            return f"write count = {num_devices} in {self.name}"
        return f"ask for {self.device.name}x{num_devices}"

    @property
    def shares_cores(self) -> bool:
        """Whether more ranks than devices may run: the ranks of a measured processor take turns."""
        return self.profile is not None

    def multiplying_by(self, table: ProductTable) -> Cluster:
        """The cluster with another table of products on its processors; unchanged without a
        profile.
        """
        if self.profile is None:
            return self
        return replace(self, profile=replace(self.profile, products=table))
