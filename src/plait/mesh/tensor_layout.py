"""How each tensor mode cuts a model, by the names of axes: weights, activations, and what moves.

The engine splits modules by these tables, and the cost model counts bytes by them. A weight is
[out, in]. Between layers activations have one of two layouts. `residual` is between a `row` and the
next `column`. `inner` is between a `column` and its `row`: the heads, or the intermediate features.

A product is y = x weight^T. Before it x and the weight may be gathered, along one axis each. After
it y may be summed along one. A move is a pair of layouts, so its gradient follows from the law of
`plait.comm.transitions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from plait.mesh.layouts import INVARIANT, PARTIAL, REPLICATED, Layout, Sharded
from plait.plan import TensorAxis

Axes = tuple[str, ...]
"""The axes that cut one dimension, the outermost first."""


@dataclass(frozen=True)
class ActivationCuts:
    """The axes that cut an activation [samples, sequence, features]."""

    samples: Axes = ()
    sequence: Axes = ()
    features: Axes = ()

    @property
    def different(self) -> Axes:
        """The axes whose ranks hold other tokens."""
        return self.samples + self.sequence

    @property
    def every(self) -> Axes:
        """The axes that cut any dimension."""
        return self.samples + self.sequence + self.features


@dataclass(frozen=True)
class Move:
    """One operand of a product, from layout `source` to `target` along an axis."""

    axis: str
    source: Layout
    target: Layout

    @property
    def dim(self) -> int:
        """The dimension along which the operand is in parts."""
        layout = self.source if isinstance(self.source, Sharded) else self.target
        assert isinstance(layout, Sharded)
        return layout.dim


def gathered(axis: str, dim: int) -> Move:
    """The move from parts along `dim` to all parts on every rank."""
    return Move(axis, Sharded(dim), REPLICATED)


def scattered(axis: str, dim: int) -> Move:
    """The move from partial sums to this rank's part of the sum, cut along `dim`."""
    return Move(axis, PARTIAL, Sharded(dim))


@dataclass(frozen=True)
class LinearLayout:
    """A linear layer: cuts of its input, output and weight, and the moves of its product.

    `partial`: the axes over which the weight's gradient is left as partial sums.
    """

    source: ActivationCuts
    target: ActivationCuts
    out: Axes
    into: Axes
    x: Move | None = None
    weight: Move | None = None
    y: Move | None = None
    partial: Axes = ()


@dataclass(frozen=True)
class EmbeddingLayout:
    """A table [vocabulary, features]: its cuts, and the sum of what the ranks look up.

    `total`: over the ranks that hold ranges of the vocabulary. `tokens`: the axis whose ranks look
    up each other's tokens. `rows`: the axis over which parts of the table's rows are gathered
    first.
    """

    vocabulary: Axes
    features: Axes
    total: Move
    tokens: str | None = None
    rows: str | None = None
    partial: Axes = ()


@dataclass(frozen=True)
class TensorLayout:
    """One tensor mode on so many ranks.

    Attributes:
        parts: the axes of the grid and their sizes, the innermost last.
        linear: the layers by role: column, qkv, row and head.
    """

    parts: tuple[tuple[str, int], ...]
    residual: ActivationCuts
    inner: ActivationCuts
    linear: Mapping[str, LinearLayout]
    embedding: EmbeddingLayout

    def size(self, axes: Axes, *, without: str | None = None) -> int:
        """The number of parts that the axes make, an axis left out if given."""
        sizes = dict(self.parts)
        return math.prod(sizes[name] for name in axes if name != without)

    def line(self, axes: Axes) -> tuple[int, int]:
        """How many ranks lie along the axes together, and how far apart neighbours are."""
        names = [name for name, _ in self.parts]
        size = self.size(axes)
        if size == 1:
            return 1, 1
        outermost = min(names.index(name) for name in axes)
        return size, math.prod(number for _, number in self.parts[outermost:]) // size


def grid_parts(mode: str, q: int, depth: int = 1) -> tuple[tuple[str, int], ...]:
    """The axes of a mode's grid and their sizes, the innermost last; none for 1D."""
    parts = {
        "2d": (("tp_row", q), ("tp_col", q)),
        "2.5d": (("tp_depth", depth), ("tp_row", q), ("tp_col", q)),
        "3d": (("tp_i", q), ("tp_j", q), ("tp_l", q)),
    }
    return parts.get(mode, ())


@dataclass(frozen=True)
class WholeFeatureAxes:
    """The axes of a grid where activations between layers have all features.

    `samples` cut these activations. `features` cuts those between a column and its row. `shards`
    are the axes of `samples` that cut weights too; along the others every rank has a copy.
    """

    samples: Axes
    features: str
    shards: Axes

    @property
    def copies(self) -> Axes:
        """The axes whose ranks have the same part of a weight, and other samples."""
        return tuple(name for name in self.samples if name not in self.shards)


def whole_feature_axes(mode: str) -> WholeFeatureAxes:
    """The axes of 2D, 2.5D or 3D, for layers whose code wants all features."""
    by_mode = {
        "2d": WholeFeatureAxes(("tp_row",), "tp_col", ("tp_row",)),
        "2.5d": WholeFeatureAxes(("tp_depth", "tp_row"), "tp_col", ("tp_row",)),
        "3d": WholeFeatureAxes(("tp_i", "tp_j"), "tp_l", ("tp_i", "tp_j")),
    }
    return by_mode[mode]


@lru_cache(maxsize=1024)
def tensor_layout(axis: TensorAxis, *, has_sequence: bool = True) -> TensorLayout:
    """The layout of a tensor axis. A model without a sequence is cut along its samples instead."""
    if axis.mode == "1d":
        return _one_d(axis, 1 if has_sequence else 0)
    parts = grid_parts(axis.mode, axis.q, axis.depth)
    if axis.mode == "3d":
        return _three_d(parts)
    depth = ("tp_depth",) if axis.mode == "2.5d" else ()
    return _two_d(parts, depth)


def _one_d(axis: TensorAxis, token_dim: int) -> TensorLayout:
    """1D: a column gathers its input or has it whole, a row sums; sequence parallel cuts tokens."""
    residual = ActivationCuts()
    between: Layout = INVARIANT
    if axis.sequence_parallel:
        between = Sharded(token_dim)
        cuts = (ActivationCuts(samples=("tp",)), ActivationCuts(sequence=("tp",)))
        residual = cuts[token_dim]
    inner = ActivationCuts(features=("tp",))
    entered = Move("tp", between, REPLICATED)
    total = Move("tp", PARTIAL, between)
    column = LinearLayout(residual, inner, out=("tp",), into=(), x=entered)
    row = LinearLayout(inner, residual, out=(), into=("tp",), y=total)
    linear = {"column": column, "qkv": column, "head": column, "row": row}
    return TensorLayout(
        (("tp", axis.size),), residual, inner, linear, EmbeddingLayout(("tp",), (), total)
    )


def _two_d(parts: tuple[tuple[str, int], ...], depth: Axes) -> TensorLayout:
    """2D and, with `depth`, 2.5D: each layer of the depth multiplies its own samples.

    X and A move for a column, A and Y for a row. A weight lies as [column of the grid, row] for a
    column. It lies as [row, column] for a row, the head and the embedding, so a tied table is one
    block.
    """
    stream = ActivationCuts(samples=(*depth, "tp_row"), features=("tp_col",))
    column = LinearLayout(
        stream,
        stream,
        out=("tp_col",),
        into=("tp_row",),
        x=gathered("tp_col", -1),
        weight=gathered("tp_row", 1),
        partial=depth,
    )
    row = LinearLayout(
        stream,
        stream,
        out=("tp_row",),
        into=("tp_col",),
        weight=gathered("tp_row", 0),
        y=scattered("tp_col", -1),
        partial=depth,
    )
    embedding = EmbeddingLayout(
        ("tp_row",), ("tp_col",), scattered("tp_row", 0), tokens="tp_row", partial=depth
    )
    linear = {"column": column, "qkv": column, "row": row, "head": row}
    return TensorLayout(parts, stream, stream, linear, embedding)


def _three_d(parts: tuple[tuple[str, int], ...]) -> TensorLayout:
    """3D: X_il = gather X_ijl over j, A_lj = gather A_lji over i, Y_ij = sum over l, scattered.

    The next layer does so with j and l exchanged, and then the residual stream is as it was. Parts
    of a block are ranges of its outputs; those of a fused matrix are ranges of its inputs.
    """
    residual = ActivationCuts(samples=("tp_i", "tp_j"), features=("tp_l",))
    inner = ActivationCuts(samples=("tp_i", "tp_l"), features=("tp_j",))
    column = LinearLayout(
        residual,
        inner,
        out=("tp_j", "tp_i"),
        into=("tp_l",),
        x=gathered("tp_j", 0),
        weight=gathered("tp_i", 0),
        y=scattered("tp_l", 0),
    )
    fused = replace(column, out=("tp_j",), into=("tp_l", "tp_i"), weight=gathered("tp_i", 1))
    row = LinearLayout(
        inner,
        residual,
        out=("tp_l", "tp_i"),
        into=("tp_j",),
        x=gathered("tp_l", 0),
        weight=gathered("tp_i", 0),
        y=scattered("tp_j", 0),
    )
    embedding = EmbeddingLayout(
        ("tp_j", "tp_i"), ("tp_l",), scattered("tp_j", 0), tokens="tp_j", rows="tp_i"
    )
    linear = {"column": column, "head": column, "qkv": fused, "row": row}
    return TensorLayout(parts, residual, inner, linear, embedding)
