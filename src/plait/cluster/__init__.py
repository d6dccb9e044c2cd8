"""Declare *where*: devices, nodes, links and prices, from presets, files or this machine's probe.
Pure; no torch.
"""

from plait.cluster.cluster import Cluster
from plait.cluster.cpu_profile import CpuProfile
from plait.cluster.hardware import Device, Network, Node
from plait.cluster.local import DEFAULT_PROBE_PATH
from plait.cluster.parse import read_probe
from plait.cluster.presets import PRESETS

__all__ = [
    "DEFAULT_PROBE_PATH",
    "PRESETS",
    "Cluster",
    "CpuProfile",
    "Device",
    "Network",
    "Node",
    "read_probe",
]
