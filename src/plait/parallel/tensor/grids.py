"""2D, 2.5D and 3D: products of blocks on a grid of ranks.

2D: Q. Xu et al., An Efficient 2D Method for Training Super-Large Deep Learning Models (Optimus,
2021), section 3. X and Y are in blocks [samples / q, ..., features / q]: samples over the rows of
ranks, features over the columns. A is in q x q blocks. A SUMMA product moves two of its three
matrices. Which two is ours to choose:

    column   Y_rc = sum over t of X_rt A_tc       X moves along its row, A along its column
    row      Y_rt = sum over c of X_rc A_ct       A moves along its column,
                                                  Y is summed along its row

so that the narrow side of a pair moves, never the intermediate features. The bytes are equal where
a layer is square.

2.5D: B. Wang et al., Tesseract: Parallelize the Tensor Parallelism Efficiently (2021), section 3. d
layers of q x q ranks: each multiplies its own samples as in 2D, by blocks that every layer holds.
The gradient of A is the sum over depth. X is [samples / (d q), ..., features / q].

3D: Z. Bian et al., Maximizing Parallelism in Distributed Training for Huge Neural Networks (2021),
section 3. On q x q x q ranks X and A are gathered, each along one axis. Y is scattered along the
third. X is [samples / q^2, ..., features / q].
"""

from __future__ import annotations

from plait.mesh import tensor_layout
from plait.mesh.tensor_layout import LinearLayout
from plait.parallel.tensor.group import TensorGroup
from plait.parallel.tensor.mode import Mode, Product
from plait.parallel.tensor.products import Gathered, PanelMove
from plait.parallel.tensor.summa import Summa


def grid(group: TensorGroup) -> Mode:
    """`tpN:2d`, `tpN:2.5d,depthD` and `tpN:3d`."""
    return Mode.of(group.layout(), group, lambda linear: _product(linear, group))


def _product(linear: LinearLayout, group: TensorGroup) -> Product:
    def bound(move: tensor_layout.Move | None) -> PanelMove | None:
        return None if move is None else PanelMove(group.axis(move.axis), move.dim)

    x = bound(linear.x)
    weight = bound(linear.weight)
    y = bound(linear.y)
    if group.mode == "3d":
        return Gathered(x, weight, y)
    assert weight is not None
    return Summa(weight, x, y, group.gather_limit_bytes)
