"""3D: Z. Bian et al., Maximizing Parallelism in Distributed Training for Huge Neural Networks,
section 3.

q x q x q ranks (i, j, l). X_ijl: samples cut by i, then j, features by l. A_lji: the block (l, j),
of which this rank keeps the i-th part.

    X_il = gather X_ijl over j,  A_lj = gather A_lji over i,  Y_ij = sum over l of X_il A_lj,
    scattered over l: Y_ijl

Y has its samples cut by i, then l, its features by j. The next layer swaps j and l, and then the
residual stream has its first layout again. Parts of a block are ranges of its first dimension,
which gather without a copy. Those of a fused matrix are ranges of its inputs.
"""

from __future__ import annotations

from plait.mesh.layouts import Sharded
from plait.parallel.tensor.group import ActivationLayout, TensorGroup
from plait.parallel.tensor.mode import EmbeddingRule, LinearRule, Mode
from plait.parallel.tensor.products import Gathered, Move


def three_d(group: TensorGroup) -> Mode:
    """`tpN:3d`."""
    # The letters of the paper.
    i, j, l = (group.axis(name) for name in ("tp_i", "tp_j", "tp_l"))  # noqa: E741
    residual = ActivationLayout(samples=group.axis(("tp_i", "tp_j")), features=l)
    inner = ActivationLayout(samples=group.axis(("tp_i", "tp_l")), features=j)
    forward = Gathered(x=Move(j, 0), weight=Move(i, 0), y=Move(l, 0))
    back = Gathered(x=Move(l, 0), weight=Move(i, 0), y=Move(j, 0))
    fused = Gathered(x=Move(j, 0), weight=Move(i, 1), y=Move(l, 0))
    column = LinearRule(residual, inner, out=(j, i), into=(l,), product=forward)
    return Mode(
        residual,
        inner,
        {
            "column": column,
            "head": column,
            "qkv": LinearRule(residual, inner, out=(j,), into=(l, i), product=fused),
            "row": LinearRule(inner, residual, out=(l, i), into=(j,), product=back),
        },
        EmbeddingRule((j, i), (l,), total=j, target=Sharded(0), tokens=j, rows=i),
    )
