"""Clusters of several kinds of device: `h100x8+a100-80gbx8`, ranks in the order of the text.

Each part is a cluster of its own. What leaves a node of one kind reaches the others at the rate of
the slowest network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.cluster.cluster import Cluster
from plait.cluster.hardware import Network
from plait.errors import ClusterError
from plait.toml import is_file

JOINT = "+"


@dataclass(frozen=True)
class MixedCluster:
    """Kinds of device in the order of their ranks."""

    name: str
    parts: tuple[Cluster, ...]

    @staticmethod
    def is_mixed(text: object) -> bool:
        """Whether a text names several clusters."""
        return isinstance(text, str) and JOINT in text and not is_file(text)

    @staticmethod
    def parse(text: str) -> MixedCluster:
        """Clusters joined by `+`. Raises `ClusterError` for a part that is no cluster, and for this
        machine, whose ranks take turns.
        """
        parts = tuple(Cluster.parse(part) for part in text.split(JOINT))
        for part in parts:
            if part.device.is_cpu:
                raise ClusterError(
                    f"cluster '{text}': {part.name} is this machine, which cannot be mixed with "
                    "others; name presets or files"
                )
        congestions = [part.network.congestion for part in parts]
        known = [one for one in congestions if one is not None]
        network = Network(
            min(part.network.bandwidth for part in parts),
            max(part.network.latency_seconds for part in parts),
            max(known) if len(known) == len(parts) else None,
            max(part.network.step_seconds for part in parts),
        )
        return MixedCluster(text, tuple(replace(part, network=network) for part in parts))

    @property
    def num_devices(self) -> int:
        """Devices of all kinds."""
        return sum(part.num_devices for part in self.parts)

    def kinds(self, size: int) -> list[int] | None:
        """The kind of each group of `size` ranks one after another; None where a group would have
        several.
        """
        if any(part.num_devices % size for part in self.parts):
            return None
        return [
            kind for kind, part in enumerate(self.parts) for _ in range(part.num_devices // size)
        ]
