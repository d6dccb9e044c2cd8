"""Optimizer state that lives on the host: what a node has room for, and what a step pays.

Gradients go down the device's own link, Adam runs on the node's processors, and weights come back.
All devices of a node share its processors. Nothing of it overlaps, as the update is the last thing
of a step. This is Ren et al., "ZeRO-Offload", section 4, without its delayed update.
"""

from __future__ import annotations

from plait.predict.cost.time.machine import Machine

HOST_LINK = 25e9
"""Bytes a second between a device and its host: four fifths of PCIe 4 x16."""
HOST_STREAM = 200e9
"""Bytes a second that a node's processors read and write together; an order of magnitude, no
source.
"""
HOST_PASSES = 3.0
"""How often an unfused Adam passes over what a fused one reads and writes. It is an order of
magnitude, without a source.
"""
HOST_BYTES = 2e12
"""Memory of a node's host, as the systems of eight accelerators have it."""
ADAM_BYTES = 28.0
"""Bytes of the update of a weight: gradient, master and two moments are read, the last three
written, in float32.
"""


def update_seconds(machine: Machine, num_devices: int, numbers: float, moved_bytes: float) -> float:
    """Seconds of an update on the host: `numbers` weights and `moved_bytes` over the link of each
    of `num_devices` ranks.
    """
    sharing = min(machine.devices_per_node, num_devices)
    return moved_bytes / HOST_LINK + sharing * numbers * ADAM_BYTES * HOST_PASSES / HOST_STREAM


def link_seconds(moved_bytes: float) -> float:
    """Seconds of a copy between a device and its host, one way."""
    return moved_bytes / HOST_LINK


def overfull(machine: Machine, num_devices: int, host_bytes: float) -> float:
    """Memory that a host would need over the memory it has, where each rank keeps `host_bytes`
    there.
    """
    return min(machine.devices_per_node, num_devices) * host_bytes / HOST_BYTES
