"""Declare *where*: devices, nodes, links and prices, from presets, files or this machine's probe.
Pure; no torch.
"""

from plait.cluster.cluster import Cluster, Device, Network, Node
from plait.cluster.host import Host
from plait.cluster.local import DEFAULT_PROBE_PATH
from plait.cluster.parse import read_probe
from plait.cluster.presets import PRESETS

__all__ = [
    "DEFAULT_PROBE_PATH",
    "PRESETS",
    "Cluster",
    "Device",
    "Host",
    "Network",
    "Node",
    "read_probe",
]
