"""The matrix products that one rank makes of a `Matmul`: forward, and the gradients of its input
and of its weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.predict.cost.model.operations import Matmul
from plait.predict.cost.sharding import Sharding


@dataclass(frozen=True)
class MatrixProducts:
    """`copies` products of (rows x inputs) by (inputs x outputs)."""

    copies: float
    rows: float
    outputs: float
    inputs: float

    def each(self) -> tuple[tuple[float, float, float], ...]:
        """(m, n, k) of `m x k @ k x n`: forward, input gradient, weight gradient."""
        rows = self.rows
        outputs = self.outputs
        inputs = self.inputs
        return (rows, outputs, inputs), (rows, inputs, outputs), (inputs, outputs, rows)


def products(op: Matmul, shard: Sharding) -> MatrixProducts:
    """The products of an operation under a sharding."""
    rows = shard.tokens * op.rows
    inputs = float(op.inputs)
    outputs = float(op.outputs)
    copies = 1.0
    if (
        op.copies > 1
    ):  # experts: the copies on this rank share the rows of all the ranks of its expert line
        copies = max(1.0, op.copies / shard.ep)
        rows *= shard.imbalance / copies
        if shard.folded:
            return MatrixProducts(copies, rows / shard.tp, outputs, inputs)
    if op.split in {"column", "row", "heads"}:
        if shard.mode == "1d":
            outputs, inputs = (
                (outputs, inputs / shard.tp) if op.split == "row" else (outputs / shard.tp, inputs)
            )
        else:
            rows = rows / (shard.q * shard.depth)
            inputs = inputs / shard.q
            outputs = outputs / shard.q
            if shard.mode != "3d":
                copies *= (
                    shard.q
                )  # SUMMA: q products of this size; 3D makes one of its gathered blocks
    elif shard.mode != "1d":
        rows /= shard.tp
    return MatrixProducts(copies, rows, outputs, inputs)
