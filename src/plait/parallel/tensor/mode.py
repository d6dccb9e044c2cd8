"""A mode as data: the meaning of each role on a grid of ranks.

Cuts and moves are those of `plait.mesh.tensor_layout`, bound to this rank's axes. `one_d` and
`grids` add the products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from plait.comm import Axis
from plait.mesh.layouts import Layout
from plait.mesh.tensor_layout import ActivationCuts, Axes, LinearLayout, TensorLayout
from plait.parallel.tensor.group import ActivationLayout, ForwardContext, TensorGroup
from plait.parallel.tensor.placement import Cut

Product = Callable[[Tensor, Tensor, "Tensor | None", ForwardContext], Tensor]
"""(x [..., in], weight [out, in], bias [out], context) -> x weight^T + bias [..., out].

Each tensor is the part that the mode gives a rank: `LinearRule` names the axes that cut its dims.
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
    """One way to split a model. `size`: the ranks that share the experts of a mixture."""

    residual: ActivationLayout
    inner: ActivationLayout
    linear: Mapping[str, LinearRule]  # by role: column, row, qkv, head
    embedding: EmbeddingRule
    size: int = 1
    coarse: Mode | None = None
    """The mode of a layer whose sizes this one does not divide."""

    @staticmethod
    def of(
        layout: TensorLayout, group: TensorGroup, product: Callable[[LinearLayout], Product]
    ) -> Mode:
        """The mode of a layout on the axes of a group; `product` multiplies a linear layer.
        Collective.
        """

        def rule(linear: LinearLayout) -> LinearRule:
            return LinearRule(
                _activations(group, linear.source),
                _activations(group, linear.target),
                out=_axes(group, linear.out),
                into=_axes(group, linear.into),
                product=product(linear),
                partial=_axes(group, linear.partial),
            )

        table = layout.embedding
        embedding = EmbeddingRule(
            _axes(group, table.vocabulary),
            _axes(group, table.features),
            total=group.axis(table.total.axis),
            target=table.total.target,
            tokens=None if table.tokens is None else group.axis(table.tokens),
            rows=None if table.rows is None else group.axis(table.rows),
            partial=_axes(group, table.partial),
        )
        return Mode(
            _activations(group, layout.residual),
            _activations(group, layout.inner),
            {role: rule(linear) for role, linear in layout.linear.items()},
            embedding,
        )


def _axes(group: TensorGroup, names: Axes) -> Cut:
    return tuple(group.axis(name) for name in names)


def _activations(group: TensorGroup, cuts: ActivationCuts) -> ActivationLayout:
    def axis(names: Axes) -> Axis | None:
        return group.axis(names if len(names) > 1 else names[0]) if names else None

    return ActivationLayout(axis(cuts.samples), axis(cuts.sequence), axis(cuts.features))
