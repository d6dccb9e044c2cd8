"""1D: M. Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism, section 3.

    column   A = [A1 A2]            Y_i = X A_i           backward: dX = sum of dX_i    (all-reduce)
    row      X = [X1 X2], A = [A1; A2]   Y = sum of X_i A_i
    (all-reduce)

The residual stream is the same on every rank. With sequence parallel (V. Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, section 4.2.2) it is cut along the
sequence: the all-reduce of a row becomes a reduce-scatter, and the next column gathers. A model
without a sequence is cut along its samples instead.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.mesh.layouts import INVARIANT, REPLICATED, Layout, Sharded
from plait.parallel.tensor import column_row
from plait.parallel.tensor.group import ActivationLayout, ForwardContext, TensorGroup
from plait.parallel.tensor.mode import EmbeddingRule, LinearRule, Mode


def one_d(group: TensorGroup, *, has_sequence: bool) -> Mode:
    """`tpN` and `tpN:1d,sp`."""
    tp = group.axis("tp")
    token_dim = 1 if has_sequence else 0
    residual = ActivationLayout()
    if group.sequence_parallel:
        residual = ActivationLayout(sequence=tp) if has_sequence else ActivationLayout(samples=tp)
    between: Layout = Sharded(token_dim) if group.sequence_parallel else INVARIANT
    reduction = column_row.RowReduction(tp, between)

    def column(x: Tensor, weight: Tensor, bias: Tensor | None, context: ForwardContext) -> Tensor:
        return column_row.column(context.enter(x, tp, between, REPLICATED), weight, bias, context)

    def row(x: Tensor, weight: Tensor, bias: Tensor | None, context: ForwardContext) -> Tensor:
        return column_row.row(x, weight, bias, context, reduction)

    inner = ActivationLayout(features=tp)
    columns = LinearRule(residual, inner, out=(tp,), into=(), product=column)
    entered = replace(
        columns, product=column_row.column
    )  # in a region, whose door has gathered already
    rows = LinearRule(inner, residual, out=(), into=(tp,), product=row)
    linear = {"column": columns, "qkv": columns, "head": columns, "row": rows}
    if group.sequence_parallel and has_sequence:
        linear |= {"column inside": entered, "qkv inside": entered, "head inside": entered}
    return Mode(
        residual,
        inner,
        linear,
        EmbeddingRule((tp,), (), total=tp, target=between),
        tp.size,
    )
