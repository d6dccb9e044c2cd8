"""2D: Q. Xu et al., An Efficient 2D Method for Training Super-Large Deep Learning Models (Optimus),
section 3.

q x q ranks. X and Y are in blocks [samples over the rows, features over the columns], A in q x q
blocks. A SUMMA product moves two of its three matrices. Which two is ours to choose:

    column   Y_rc = sum over t of X_rt A_tc       X moves along its row, A along its column
    row      Y_rt = sum over c of X_rc A_ct       A moves along its column, Y is summed along its
    row

so that the narrow side of a pair moves, never the intermediate features. The bytes are equal where
a layer is square. A weight [out, in] lies as [column of the grid, row] for `column`. It lies as
[row, column] for `row`, `head` and the embedding, so a tied table is one block. 2.5D takes this
mode for every layer of its depth.
"""

from __future__ import annotations

from plait.mesh import AxisName
from plait.mesh.layouts import Sharded
from plait.parallel.tensor.group import ActivationLayout, TensorGroup
from plait.parallel.tensor.mode import EmbeddingRule, LinearRule, Mode
from plait.parallel.tensor.products import Move
from plait.parallel.tensor.summa import Summa


def two_d(group: TensorGroup) -> Mode:
    """`tpN:2d`."""
    return grid(group, samples="tp_row", partial=())


def grid(group: TensorGroup, *, samples: AxisName, partial: tuple[AxisName, ...]) -> Mode:
    """A q x q grid; `samples` is the axis that cuts the samples, `partial` those along which
    weights are copies.
    """
    rows = group.axis("tp_row")
    columns = group.axis("tp_col")
    over = tuple(group.axis(name) for name in partial)
    stream = ActivationLayout(samples=group.axis(samples), features=columns)
    forward = Summa(x=Move(columns, -1), weight=Move(rows, 1), limit_bytes=group.gather_limit_bytes)
    back = Summa(weight=Move(rows, 0), y=Move(columns, -1), limit_bytes=group.gather_limit_bytes)
    column = LinearRule(stream, stream, out=(columns,), into=(rows,), product=forward, partial=over)
    row = LinearRule(stream, stream, out=(rows,), into=(columns,), product=back, partial=over)
    return Mode(
        stream,
        stream,
        {"column": column, "qkv": column, "row": row, "head": row},
        EmbeddingRule(
            (rows,), (columns,), total=rows, target=Sharded(0), tokens=rows, partial=over
        ),
    )
