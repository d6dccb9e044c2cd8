"""WHO and WHICH PART: named axes of ranks, and the layouts of tensors on them. Pure; only `groups`
knows torch.
"""

from __future__ import annotations

from plait.mesh.layouts import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Invariant,
    Layout,
    Partial,
    Replicated,
    Sharded,
)
from plait.mesh.mesh import AxisName, Mesh
from plait.mesh.shard import Shard
from plait.mesh.slices import shard_range, shard_sizes

__all__ = [
    "INVARIANT",
    "PARTIAL",
    "REPLICATED",
    "AxisName",
    "Invariant",
    "Layout",
    "Mesh",
    "Partial",
    "Replicated",
    "Shard",
    "Sharded",
    "shard_range",
    "shard_sizes",
]
