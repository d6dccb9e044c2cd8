"""This machine as a cluster of one node, from what `plait probe` measured.

Measured rates are what a kernel reaches, not a data sheet's peak: `matmul_efficiency` is 1, so that
nothing is discounted twice. The probe itself needs torch and lives elsewhere; here is only what its
file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from plait.cache_folder import cache_folder
from plait.cluster.bounds import Bounds, number_faults
from plait.cluster.cpu_profile import profile_of_host
from plait.cluster.hardware import Device, Hardware, Network, Node
from plait.errors import ClusterError
from plait.values import JsonMapping

PROBE_KEYS: Final[dict[str, Bounds]] = {
    "num_devices": Bounds(1, 1e5, "devices (the ranks that run side by side)", whole=True),
    "memory_bytes": Bounds(1e6, 1e15, "bytes for each device"),
    "memory_bandwidth": Bounds(1e6, 1e15, "bytes/s for each device"),
    "link_bandwidth": Bounds(1e3, 1e14, "bytes/s for each device and direction"),
    "link_latency_seconds": Bounds(1e-9, 10, "seconds for one small message"),
}
"""The numbers of a probe file, beside `peak_flops` (flop/s of each device by precision); `name` and
`is_cpu` are optional.
"""


def probe_path() -> Path:
    """The file that `plait probe` writes where no other is named."""
    return cache_folder() / "probe.json"


def hardware_of_probe(probe: JsonMapping | None, cluster: str = "local") -> Hardware:
    """The hardware of `Cluster.local`, or of what another `cluster` has measured.

    Raises:
        ClusterError: there are no measurements, or wrong ones.
    """
    if probe is None:
        raise ClusterError(
            "cluster 'local': this machine has not been measured yet; run plait probe, then ask "
            "again"
        )
    wrong = [f"{key} is missing" for key in PROBE_KEYS if key not in probe]
    for key, bounds in PROBE_KEYS.items():
        wrong += number_faults(key, probe[key], bounds) if key in probe else []
    given = probe.get("peak_flops")
    peaks: JsonMapping = given if isinstance(given, Mapping) else {}
    if "float32" not in peaks:
        wrong.append("peak_flops is missing, a table of flop/s with at least float32")
    for precision, rate in peaks.items():
        wrong += number_faults(f"peak_flops.{precision}", rate, Bounds(1e6, 1e17, "flop/s"))
    if wrong:
        raise ClusterError(
            "\n  ".join(
                [f"cluster '{cluster}': the measurements are wrong; run plait probe again", *wrong]
            )
        )
    known = {key: value for key, value in probe.items() if value is not None}
    link = float(probe["link_bandwidth"])
    latency = float(probe["link_latency_seconds"])
    return Hardware(
        name=cluster,
        device=Device(
            name=str(probe.get("name", "local")),
            flops={precision: float(rate) for precision, rate in peaks.items()},
            memory_bytes=float(probe["memory_bytes"]),
            memory_bandwidth=float(probe["memory_bandwidth"]),
            matmul_efficiency=1.0,
            is_cpu=bool(probe.get("is_cpu", True)),
        ),
        node=Node(probe["num_devices"], link, latency),
        network=Network(link, latency),
        num_devices=probe["num_devices"],
        profile=profile_of_host(known["host"]) if "host" in known else None,
    )
