"""Operations fused with the computation of their operand, which is written into the send buffer.

A send buffer is borrowed staging memory. Where ranks can read each other's memory, the operand is
then sent without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from plait.comm.axis import Axis
from plait.comm.functional import reduced
from plait.comm.work import Work
from plait.mesh.layouts import Layout

Compute = Callable[[Tensor], object]
"""Writes the operand into a contiguous tensor."""


def compute_and_reduce(
    axis: Axis, target: Layout, shape: Sequence[int], like: Tensor, compute: Compute
) -> Tensor:
    """The sum over the axis of the operand that `compute` writes on each rank.

    Args:
        axis: the ranks that add up.
        target: R or I for the whole sum, S(d) for the own shard of it.
        shape: of the operand.
        like: a tensor of the type and device of the operand.
        compute: writes the operand.
    """
    buffer = axis._borrow(shape, like)
    compute(buffer)
    return reduced(buffer, axis, target)


def compute_and_shift(axis: Axis, out: Tensor, by: Sequence[int], compute: Compute) -> Work:
    """Send parts round the ring, part i to coordinate `rank + by[i]`, and add those that come to
    `out`.

    `compute` writes the parts, (len(by), *out.shape); `by` is alike on all ranks.

    Raises:
        PlanError: a distance that leads back to this rank.
    """
    buffer = axis._borrow((len(by), *out.shape), out)
    compute(buffer)
    return axis._shift_and_add(out, buffer, by)
