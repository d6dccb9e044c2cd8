"""A mode as data: what each role means on a grid of ranks. `one_d`, `two_d`, `two_and_half_d` and
`three_d` each make one.

Between layers activations have one of two layouts. `residual` is between a `row` and the next
`column`. `inner` is between a `column` and its `row`: the heads, or the intermediate features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from plait.comm import Axis
from plait.mesh.layouts import Layout
from plait.parallel.tensor.group import ActivationLayout, ForwardContext
from plait.parallel.tensor.placement import Cut

Product = Callable[[Tensor, Tensor, "Tensor | None", ForwardContext], Tensor]
"""(x [..., in], weight [out, in], bias [out], context) -> x weight^T + bias.

Each tensor is the part that the mode gives a rank.
"""


@dataclass(frozen=True)
class LinearRule:
    """A linear layer: the axes that cut its weight [out, in], how to multiply, and the layouts of
    its input and output.

    `partial`: the axes over which the weight's gradient is left as partial sums.
    """

    source: ActivationLayout
    target: ActivationLayout
    out: Cut
    into: Cut
    product: Product
    partial: Cut = ()


@dataclass(frozen=True)
class EmbeddingRule:
    """An embedding table [vocabulary, features]: the axes that cut it, and how rows become vectors.

    `tokens`: the axis whose ranks look up each other's tokens. `rows`: the axis over which parts of
    the table's rows are gathered first. `total`: the axis whose ranks each hold a range of the
    vocabulary; the sum over it takes the layout `target`.
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

    residual: ActivationLayout
    inner: ActivationLayout
    linear: Mapping[str, LinearRule]  # by role: column, row, qkv, head
    embedding: EmbeddingRule
    size: int = 1
