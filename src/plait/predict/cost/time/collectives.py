"""Time of one collective by algorithm and topology: ring, tree, or hierarchical, whichever is
fastest.

These are the formulas of accelerators; a processor measures its own.
"""

from __future__ import annotations

import math
from functools import lru_cache

from plait.comm.transitions import bytes_sent
from plait.predict.cost.time.groups import Group, group
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.messages import Message


def collective_seconds(machine: Machine, op: str, payload_bytes: float, ranks: Group) -> float:
    """Seconds of one collective; `payload_bytes` as in `plait.comm.transitions.bytes_sent`."""
    if ranks.size <= 1 or payload_bytes <= 0:
        return 0.0
    efficiency = machine.efficiency
    sent = _sent(op, payload_bytes, ranks.size)
    start = efficiency.collective_seconds * (2 if op == "all_reduce" else 1)
    if ranks.nodes == 1:
        return (
            start
            + _hops(op, ranks.size) * machine.link_latency
            + sent / (machine.link_bandwidth * efficiency.link)
        )
    network = network_rate(machine, ranks.nodes)
    if op in {"send", "shift"}:
        return start + machine.network_latency + sent / network
    if op == "all_to_all":
        outside = sent * (ranks.size - ranks.in_node) / max(1, ranks.size - 1)
        return (
            start
            + ranks.nodes * machine.network_latency
            + outside / network
            + (sent - outside) / (machine.link_bandwidth * efficiency.link)
        )
    ring = _hops(op, ranks.size) * machine.network_latency + sent / min(
        machine.link_bandwidth * efficiency.link, ranks.in_node * network
    )
    return start + min(ring, _hierarchical(machine, op, payload_bytes, ranks))


def network_rate(machine: Machine, nodes: int) -> float:
    """Bytes a second through one device's port when `nodes` nodes talk at once."""
    efficiency = machine.efficiency
    return (
        machine.network_bandwidth
        * efficiency.network
        / (1 + efficiency.congestion * math.log2(max(1, nodes)))
    )


def _sent(op: str, payload_bytes: float, size: int) -> float:
    return float(bytes_sent(op, int(payload_bytes), size))


def _hops(op: str, size: int) -> int:
    if op in {"send", "shift"}:
        return 1
    return 2 * (size - 1) if op == "all_reduce" else size - 1


def _hierarchical(machine: Machine, op: str, payload_bytes: float, ranks: Group) -> float:
    """Inside the nodes first, then between them with 1/g of the data on each port, by tree steps in
    latency.
    """
    efficiency = machine.efficiency
    rounds = 2 if op == "all_reduce" else 1
    inside = (
        rounds
        * (ranks.in_node - 1)
        / ranks.in_node
        * payload_bytes
        / (machine.link_bandwidth * efficiency.link)
    )
    share = payload_bytes / ranks.in_node
    between = rounds * (ranks.nodes - 1) / ranks.nodes * share / network_rate(machine, ranks.nodes)
    steps = rounds * math.ceil(math.log2(ranks.nodes))
    return (
        inside
        + between
        + steps * machine.network_latency
        + rounds * (ranks.in_node - 1) * machine.link_latency
    )


@lru_cache(maxsize=65536)
def messages_seconds(machine: Machine, messages: tuple[Message, ...]) -> float:
    """Seconds of collectives one after another."""
    return sum(
        message.count
        * machine.collective_seconds(
            message.op,
            message.payload_bytes,
            group(message.size, message.stride, machine.devices_per_node),
        )
        for message in messages
    )
