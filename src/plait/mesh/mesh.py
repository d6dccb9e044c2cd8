"""The mesh: ranks 0..n-1 named by their coordinates on the axes pp, dp, cp, tp.

The tensor axis is innermost, because it sends most often and neighbours in rank are neighbours in
hardware. The expert axis `ep` owns no ranks. It borrows the inner part of the dp x cp line, and
`edp` is what remains of that line. Where the ranks of several nodes meet on it, `ep_local` is its
part inside a node. `ep_nodes` goes from node to node.

         pp outermost            a rank = ((pp * DP + dp) * CP + cp) * TP + tp
        /  dp (dp_replicate, dp_shard)
       /  /  cp
      /  /  /  tp innermost (2d: tp_row, tp_col; 2.5d: tp_depth, tp_row, tp_col;
                             3d: tp_i, tp_j, tp_l)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from plait.errors import PlanError, nearest
from plait.mesh.tensor_layout import grid_parts
from plait.plan import Plan

AxisName = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the axes. Every name that `line` takes: the axes, their sub-axes, `ep`, `edp`,
    `world`, and tuples of these.

    `node` is the number of ranks of a node, whose ranks follow each other; 0: all are on one.

    Raises:
        PlanError: a size below one, or parts whose product is not the size of their axis.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    dp_replicate: int = 1
    node: int = 0
    tp_parts: tuple[
        tuple[str, int], ...
    ] = ()  # (sub-axis, size), outermost first; empty: tp has no sub-axes

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "cp", "tp", "ep", "dp_replicate"):
            if getattr(self, name) < 1:
                raise PlanError(
                    f"the size of axis {name} is {getattr(self, name)}; it must be at least 1"
                )
        if self.dp % self.dp_replicate:
            raise PlanError(
                f"dp{self.dp} cannot be cut into {self.dp_replicate} replicas; replicate must "
                f"divide {self.dp}"
            )
        if (self.dp * self.cp) % self.ep:
            raise PlanError(
                f"ep{self.ep} must divide dp x cp = {self.dp * self.cp}, from which it borrows its "
                "ranks"
            )
        if self.tp_parts and math.prod(size for _, size in self.tp_parts) != self.tp:
            parts = " x ".join(f"{name}{size}" for name, size in self.tp_parts)
            raise PlanError(f"the parts {parts} of tp do not multiply to tp{self.tp}")

    @staticmethod
    def of(plan: Plan) -> Mesh:
        """The mesh of a plan."""
        tp = plan.tp
        return Mesh(
            pp=plan.pp.size,
            dp=plan.dp.size,
            cp=plan.cp.size,
            tp=tp.size,
            ep=plan.ep,
            dp_replicate=plan.dp.replicate,
            tp_parts=grid_parts(tp.mode, tp.q, tp.depth),
        )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def names(self) -> tuple[str, ...]:
        """Every single axis name of this mesh."""
        experts = ("ep", "ep_local", "ep_nodes", "edp")
        return (
            "pp",
            "dp",
            "cp",
            "tp",
            "dp_replicate",
            "dp_shard",
            *(name for name, _ in self.tp_parts),
            *experts,
            "world",
        )

    @property
    def experts_span_nodes(self) -> bool:
        """Whether every line of `ep` is ranks of several nodes, as many of each, and more than
        one.
        """
        if self.node < 1:
            return False
        parts = [[rank // self.node for rank in line] for line in self.lines("ep")]
        counts = {nodes.count(node) for nodes in parts for node in nodes}
        return len(counts) == 1 and counts.pop() > 1 and all(len(set(nodes)) > 1 for nodes in parts)

    def axis_size(self, axis: AxisName) -> int:
        """The number of ranks along an axis or a product of axes."""
        return len(self.line(0, axis))

    def line(self, rank: int, axis: AxisName) -> tuple[int, ...]:
        """The global ranks that differ from `rank` only on `axis`, `rank` among them, in the order
        of their coordinates.

        A tuple of names is their product, the last name fastest. On 2d, the line of `tp_row` runs
        over the rows: it is a column of the grid.

        Raises:
            PlanError: an unknown axis, or a rank outside the mesh.
        """
        return _line(self, rank, axis)

    def lines(self, axis: AxisName) -> tuple[tuple[int, ...], ...]:
        """All lines of an axis, each once, ordered by their smallest rank: the same answer on every
        rank.
        """
        return _lines(self, axis)

    def coordinate(self, rank: int, axis: AxisName) -> int:
        """The place of `rank` on its own line of `axis`."""
        return self.line(rank, axis).index(rank)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank on pp, dp, cp and tp."""
        return {name: self.coordinate(rank, name) for name in ("pp", "dp", "cp", "tp")}

    def rank_at(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank with these coordinates: the inverse of `coordinates`."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def _stride_and_size(self, name: str) -> tuple[int, int]:
        """An axis that owns ranks is an arithmetic progression of ranks."""
        strides = {
            "tp": 1,
            "cp": self.tp,
            "dp": self.cp * self.tp,
            "pp": self.dp * self.cp * self.tp,
        }
        if name in strides:
            return strides[name], getattr(self, name)
        shard = self.dp // self.dp_replicate
        if name == "dp_shard":
            return strides["dp"], shard
        if name == "dp_replicate":
            return strides["dp"] * shard, self.dp_replicate
        stride = 1
        for part, size in reversed(self.tp_parts):
            if part == name:
                return stride, size
            stride *= size
        raise PlanError(f"no axis {name!r} on this mesh; {nearest(name, self.names)}")

    def __iter__(self) -> Iterator[int]:
        """The ranks."""
        return iter(range(self.size))


@lru_cache(maxsize=65536)
def _line(mesh: Mesh, rank: int, axis: AxisName) -> tuple[int, ...]:
    if not 0 <= rank < mesh.size:
        raise PlanError(f"rank {rank} is outside the mesh of {mesh.size} ranks")
    if isinstance(axis, tuple):
        if not axis:
            return (rank,)
        line = tuple(
            inner for outer in _line(mesh, rank, axis[0]) for inner in _line(mesh, outer, axis[1:])
        )
        if len(set(line)) < len(line):
            raise PlanError(
                f"the axes {' x '.join(axis)} overlap; a product takes each direction of the mesh "
                "once"
            )
        return line
    if axis == "world":
        return tuple(range(mesh.size))
    if axis in {"ep", "edp"}:
        pool = _line(mesh, rank, ("dp", "cp"))
        place = pool.index(rank)
        ep = mesh.ep
        return pool[place // ep * ep :][:ep] if axis == "ep" else pool[place % ep :: ep]
    if axis in {"ep_local", "ep_nodes"}:
        whole = _line(mesh, rank, "ep")
        nodes = [other // mesh.node if mesh.node else 0 for other in whole]
        local = tuple(
            other
            for other, node in zip(whole, nodes, strict=True)
            if node == nodes[whole.index(rank)]
        )
        return local if axis == "ep_local" else whole[local.index(rank) :: len(local)]
    stride, size = mesh._stride_and_size(axis)
    first = rank - rank // stride % size * stride
    return tuple(range(first, first + stride * size, stride))


@lru_cache(maxsize=4096)
def _lines(mesh: Mesh, axis: AxisName) -> tuple[tuple[int, ...], ...]:
    seen: dict[frozenset[int], tuple[int, ...]] = {}
    for rank in mesh:
        line = _line(mesh, rank, axis)
        seen.setdefault(frozenset(line), line)
    return tuple(seen.values())
