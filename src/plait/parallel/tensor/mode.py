"""A mode as data: what each role means on a grid of ranks. `one_d`, `two_d`, `two_and_half_d` and
`three_d` each make one.

Between layers activations are in one of two streams: `residual` (between a `row` and the next
`column`) and `inner` (between a `column` and its `row`: the heads, or the intermediate features).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from plait.comm import Axis
from plait.mesh.layouts import Layout
from plait.parallel.tensor.group import Run, Stream
from plait.parallel.tensor.placement import Cut

Product = Callable[[Tensor, Tensor, "Tensor | None", Run], Tensor]
"""(x [..., in], weight [out, in], bias [out], run) -> x weight^T + bias, each in the parts that the
mode gives a rank.
"""


@dataclass(frozen=True)
class LinearRule:
    """A linear layer: which axes cut its weight [out, in], how to multiply, and from which stream
    into which.

    `partial`: the axes over which the weight's gradient is left as partial sums.
    """

    source: Stream
    target: Stream
    out: Cut
    into: Cut
    product: Product
    partial: Cut = ()


@dataclass(frozen=True)
class EmbeddingRule:
    """A table [vocabulary, features]: which axes cut it, and how the rows that each rank finds
    become the stream.

    `tokens`: the axis whose ranks look up each other's tokens. `rows`: the axis over which parts of
    the table's rows are gathered first. `total`: the axis whose ranks each hold a range of the
    vocabulary, and what becomes of the sum.
    """

    vocabulary: Cut
    features: Cut
    total: Axis
    target: Layout
    tokens: Axis | None = None
    rows: Axis | None = None
    partial: Cut = ()


@dataclass(frozen=True)
class Mode:
    """One way to split a model."""

    residual: Stream
    inner: Stream
    linear: Mapping[str, LinearRule]  # by role: column, row, qkv, head
    embedding: EmbeddingRule
    size: int = 1
