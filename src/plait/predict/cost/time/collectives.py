"""Time of one collective by algorithm, protocol and topology, whichever is fastest.

These are the formulas of accelerators, as NCCL chooses by them itself (src/graph/tuning.cc). Each
step of a ring has a latency. A gather or a scatter over N ranks has N-1 steps and no shorter way.
Small messages go by a protocol of low latency and less bandwidth. A processor measures its own.
"""

from __future__ import annotations

import math
from functools import lru_cache

from plait.comm.transitions import bytes_sent
from plait.predict.cost.time.groups import Group, group
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.messages import Message

LOW_LATENCY = 0.2
"""A step of the protocol of low latency, of one of the plain protocol. NCCL's `hwLat` has 0.6 of
3.4 microseconds on NVLink, 1.0 of 5.7 on PCIe.
"""
LOW_BANDWIDTH = 0.35
"""Bandwidth of that protocol, of the plain one's, as half of each word is a flag. NCCL's own model
says a quarter; measured inside nodes it is a little more.
"""
CROSSING_SECONDS = 18e-6
"""A step between nodes beyond the network's own latency: host threads pass each chunk to the port
and on. Set by collectives of 64 kB to 1 MB over two nodes (`benchmarks.planner.parts`).
"""
RAMP_SECONDS = 5e-6
"""Loss of messages of medium size: the root of this times the seconds that their bytes take."""
TREE = 0.9
"""Bus bandwidth of a tree, of a ring's (NCCL's model)."""
IN_SWITCH = 1.35
"""An all-reduce whose sums are made in the node's switch, over one by a ring. Eight H100 have 430
GB/s of bus bandwidth, against 322 of an all-gather (256 MB); H200 446 against 324.
"""


def collective_seconds(machine: Machine, op: str, payload_bytes: float, ranks: Group) -> float:
    """Seconds of one collective; `payload_bytes` as in `plait.comm.transitions.bytes_sent`."""
    if ranks.size <= 1 or payload_bytes <= 0:
        return 0.0
    start = machine.collective_start + machine.efficiency.collective_seconds
    sent = _sent(op, payload_bytes, ranks.size)
    inside, between = _hops(op, ranks)
    if op in {"all_to_all", "send", "shift"} and ranks.nodes > 1:
        return start + between * machine.network_latency + _exchange(machine, op, sent, ranks)
    rate = ring_rate(machine, op, ranks)
    rounds = 2 if op == "all_reduce" else 1
    seconds = rounds * protocol_seconds(
        machine, (inside / rounds, between / rounds), sent / rate / rounds
    )
    if ranks.nodes > 1:
        seconds = max(seconds, rounds * (ranks.size - 1) * machine.network_step)
    if op == "all_reduce" and ranks.nodes > 1:
        seconds = min(seconds, _tree(machine, sent, ranks))
    return start + seconds


def ring_rate(machine: Machine, op: str, ranks: Group) -> float:
    """Bytes a second that one rank of a ring sends: its link's, or its node's ports together."""
    link = machine.node_rate(min(ranks.size, ranks.in_node)) * machine.efficiency.link
    if ranks.nodes == 1:
        return link * (IN_SWITCH if op == "all_reduce" and machine.sums_in_switch(ranks) else 1.0)
    return min(link, ranks.in_node * network_rate(machine, ranks.nodes))


def network_rate(machine: Machine, nodes: int) -> float:
    """Bytes a second through one device's port when `nodes` nodes talk at once."""
    efficiency = machine.efficiency
    return (
        machine.network_bandwidth
        * efficiency.network
        / (1 + machine.congestion * math.log2(max(1, nodes)))
    )


def _sent(op: str, payload_bytes: float, size: int) -> float:
    return float(bytes_sent(op, int(payload_bytes), size))


def _hops(op: str, ranks: Group) -> tuple[int, int]:
    """Steps one after another, inside nodes and between them."""
    if op in {"send", "shift"}:
        return (1, 0) if ranks.nodes == 1 else (0, 1)
    if op == "all_to_all":
        return (ranks.in_node - 1, ranks.nodes - 1)
    rounds = 2 if op == "all_reduce" else 1
    between = ranks.nodes - 1
    return rounds * (ranks.size - 1 - between), rounds * between


def _exchange(machine: Machine, op: str, sent: float, ranks: Group) -> float:
    """Bytes to other ranks directly: what leaves the node goes through the rank's own port."""
    outside = sent
    if op == "all_to_all":
        outside = sent * (ranks.size - ranks.in_node) / max(1, ranks.size - 1)
    link = machine.node_rate(ranks.in_node) * machine.efficiency.link
    return outside / network_rate(machine, ranks.nodes) + (sent - outside) / link


def _tree(machine: Machine, sent: float, ranks: Group) -> float:
    """Double binary trees: up and down in as many steps between nodes as the trees are deep.

    Of two nodes whose switches add up, each sends its sum once, where a ring sends it twice.
    """
    depth = math.ceil(math.log2(ranks.nodes))
    inside = ranks.in_node - 1
    node = Group(ranks.in_node, ranks.in_node)
    ports = ranks.in_node * network_rate(machine, ranks.nodes)
    if ranks.nodes == 2 and machine.sums_in_switch(node):
        ports *= 2
    rate = TREE * min(ring_rate(machine, "all_reduce", node), ports)
    return 2 * protocol_seconds(machine, (inside, depth), sent / rate / 2)


def protocol_seconds(machine: Machine, steps: tuple[float, float], moving: float) -> float:
    """Seconds of so many steps inside and between nodes and of bytes that take `moving` seconds, by
    the quicker protocol.
    """
    inside, between = steps
    low = LOW_LATENCY * machine.link_latency
    quick = inside * low + moving / LOW_BANDWIDTH
    plain = inside * machine.link_latency + moving + math.sqrt(RAMP_SECONDS * moving)
    return min(quick, plain) + between * (machine.network_latency + CROSSING_SECONDS)


@lru_cache(maxsize=65536)
def messages_seconds(machine: Machine, messages: tuple[Message, ...], parts: int = 1) -> float:
    """Seconds of collectives one after another, each of which is sent in so many parts, or its
    share of them.
    """
    return sum(
        message.count
        * (parts * message.share)
        * machine.collective_seconds(
            message.op,
            message.payload_bytes / (parts * message.share),
            group(message.size, message.stride, machine.devices_per_node),
        )
        for message in messages
    )
