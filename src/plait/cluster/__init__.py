"""Declare *where*: devices, nodes, links and prices, from presets, files or this machine's probe.
Pure; no torch.
"""

from plait.cluster.cluster import Cluster
from plait.cluster.cpu_profile import CpuProfile
from plait.cluster.hardware import Device, Network, Node
from plait.cluster.local import probe_path
from plait.cluster.parse import hold_probe, read_probe
from plait.cluster.presets import PRESETS

__all__ = [
    "PRESETS",
    "Cluster",
    "CpuProfile",
    "Device",
    "Network",
    "Node",
    "hold_probe",
    "probe_path",
    "read_probe",
]
