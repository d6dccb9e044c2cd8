"""Ranks of a collective, as far as its time depends on them: how many, and how many in a node.

Every rank owns a network port. So a ring through nodes that hold g ranks of the group can use g
ports (Thakur et al., 2005; NCCL's rings).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """The ranks that meet in a collective: how many, and how many of them in each node."""

    size: int
    in_node: int

    @property
    def nodes(self) -> int:
        """The nodes that the group spans."""
        return -(-self.size // self.in_node)


def group(size: int, stride: int, devices_per_node: int) -> Group:
    """The group of `size` ranks, `stride` apart, on nodes of `devices_per_node` ranks."""
    return Group(size, max(1, min(size, devices_per_node // stride)))
