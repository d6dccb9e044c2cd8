"""1D: M. Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism (2019), section 3.

    column   A = [A1 A2]                 Y_i = X A_i
             backward                    dX = sum of dX_i      (all-reduce)
    row      X = [X1 X2], A = [A1; A2]   Y = sum of X_i A_i    (all-reduce)

The residual stream is the same on every rank. With sequence parallel (V. Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.2.2) it is cut
along the sequence. The all-reduce of a row becomes a reduce-scatter then, and the next column
gathers. A model without a sequence is cut along its samples instead.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.mesh.tensor_layout import LinearLayout
from plait.parallel.tensor import column_row
from plait.parallel.tensor.group import ForwardContext, TensorGroup
from plait.parallel.tensor.mode import Mode, Product


def one_d(group: TensorGroup, *, has_sequence: bool) -> Mode:
    """`tpN` and `tpN:1d,sp`."""
    layout = group.layout(has_sequence=has_sequence)
    mode = Mode.of(layout, group, lambda linear: _product(linear, group))
    linear = dict(mode.linear)
    linear["column_inside"] = replace(mode.linear["column"], product=column_row.column)
    if layout.residual.sequence:
        # Inside a region, whose door has gathered already.
        for role in ("column", "qkv", "head"):
            linear[f"{role} inside"] = replace(mode.linear[role], product=column_row.column)
    return replace(mode, linear=linear, size=group.size)


def _product(linear: LinearLayout, group: TensorGroup) -> Product:
    tp = group.axis("tp")

    def column(x: Tensor, weight: Tensor, bias: Tensor | None, context: ForwardContext) -> Tensor:
        assert linear.x is not None
        entered = context.enter(x, tp, linear.x.source, linear.x.target)
        return column_row.column(entered, weight, bias, context)

    if linear.y is None:
        return column
    reduction = column_row.RowReduction(tp, linear.y.target)

    def row(x: Tensor, weight: Tensor, bias: Tensor | None, context: ForwardContext) -> Tensor:
        return column_row.row(x, weight, bias, context, reduction)

    return row
