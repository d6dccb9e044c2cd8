"""2D, 2.5D and 3D for a model whose code wants all features between layers.

Roles from dataflow say what happens between a column and its row, and nothing of the code outside.
So the grid cuts what that code never looks at, the samples:

    stream      X_r      samples over the rows of the grid, whole along its columns
    column      Y_rc = X_r (A_c gathered over the rows)        backward: dX = sum over columns
    row         Z_r = sum over c of Y_rc (B_c gathered over the rows)

A weight lies in q x q blocks, as in `grids`, and in q x q x q under 3D. Between a column and its
row so do activations. In the stream they are in q parts instead of q x q.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plait.comm import Axis
from plait.comm.functional import transition
from plait.mesh.layouts import INVARIANT, PARTIAL, REPLICATED
from plait.mesh.tensor_layout import Axes, whole_feature_axes
from plait.parallel.tensor.group import ActivationLayout, ForwardContext, TensorGroup
from plait.parallel.tensor.mode import EmbeddingRule, LinearRule, Mode
from plait.parallel.tensor.placement import Cut
from plait.parallel.tensor.products import Gathered, PanelMove


def whole_features(group: TensorGroup) -> Mode:
    """The mode of a grid for roles that count on whole features. Collective."""
    axes = whole_feature_axes(group.mode)
    samples = _joined(group, axes.samples)
    features = group.axis(axes.features)
    shards = _joined(group, axes.shards)
    copies = tuple(group.axis(name) for name in axes.copies)
    coarse = _mode(samples, features, None, (samples,), group.size)
    return _mode(samples, features, shards, copies, group.size, coarse)


def _joined(group: TensorGroup, names: Axes) -> Axis:
    return group.axis(names if len(names) > 1 else names[0])


def _mode(  # noqa: PLR0917
    samples: Axis,
    features: Axis,
    shards: Axis | None,
    copies: Cut,
    size: int,
    coarse: Mode | None = None,
) -> Mode:
    """Weights are cut over `shards` too, where given, and their gradients summed over `copies`."""
    stream = ActivationLayout(samples=samples)
    inner = ActivationLayout(samples=samples, features=features)
    cut: Cut = () if shards is None else (shards,)
    by_input = None if shards is None else PanelMove(shards, 1)
    by_output = None if shards is None else PanelMove(shards, 0)
    column = LinearRule(stream, inner, (features,), cut, _BlockColumn(features, by_input), copies)
    entered = LinearRule(stream, inner, (features,), cut, _BlockColumn(None, by_input), copies)
    head = LinearRule(
        stream, inner, (features, *cut), (), _BlockColumn(features, by_output), copies
    )
    row = LinearRule(inner, stream, cut, (features,), _BlockRow(features, by_output), copies)
    table = EmbeddingRule(
        (features, *cut), (), total=features, target=INVARIANT, rows=shards, partial=copies
    )
    linear = {"column": column, "column_inside": entered, "qkv": column, "head": head, "row": row}
    return Mode(stream, inner, linear, table, size, coarse)


@dataclass(frozen=True)
class _BlockColumn:
    """x whole -> features in parts. `axis` is None where the input is shared inside already."""

    axis: Axis | None
    weight: PanelMove | None

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: ForwardContext
    ) -> Tensor:
        if self.axis is not None:
            x = context.enter(x, self.axis, INVARIANT, REPLICATED)
        return Gathered(weight=self.weight)(x, weight, bias, context)


@dataclass(frozen=True)
class _BlockRow:
    """x in parts of features -> the sum over these, whole."""

    axis: Axis
    weight: PanelMove | None

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: ForwardContext
    ) -> Tensor:
        partial = Gathered(weight=self.weight)(x, weight, None, context)
        total = transition(partial, self.axis, PARTIAL, INVARIANT)
        return total if bias is None else total + bias
