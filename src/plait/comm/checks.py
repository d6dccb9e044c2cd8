"""The checks of what callers hand to an axis: contiguous memory, shapes, peers and splits. Each
error names the axis and its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from plait.errors import PlanError


class RankGroup(Protocol):
    """The facts of an axis that an error names."""

    name: str
    rank: int
    size: int


def contiguous(axis: RankGroup, tensor: Tensor) -> Tensor:
    """The tensor [...] without its graph: communication here is no operation of autograd
    (`transition` is).

    Raises:
        PlanError: strides that are not contiguous.
    """
    if not tensor.is_contiguous():
        raise PlanError(
            f"axis {axis.name}: a tensor of shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} is not contiguous; call .contiguous() first"
        )
    return tensor.detach()


def flat(axis: RankGroup, op: str, part: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """Views of both tensors, `part` (n,) and `full` (size * n,): room for the part of every rank.

    Raises:
        PlanError: another number of elements, two dtypes, or strides that are not contiguous.
    """
    if full.numel() != axis.size * part.numel() or full.dtype != part.dtype:
        raise PlanError(
            f"{op} on axis {axis.name} of size {axis.size}: the full tensor has {full.numel()} "
            f"{full.dtype}, the part {part.numel()} {part.dtype}; full must be {axis.size} x part, "
            "of one dtype"
        )
    return contiguous(axis, part).view(-1), contiguous(axis, full).view(-1)


def check_shapes(axis: RankGroup, op: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raise `PlanError` where a shape is not the expected one."""
    if tuple(found) != tuple(expected):
        raise PlanError(
            f"{op} on axis {axis.name} of size {axis.size}: shape {tuple(found)} must be "
            f"{tuple(expected)}"
        )


def check_peer(axis: RankGroup, peer: int, other: bool = False) -> None:
    """Raise `PlanError` where `peer` is no coordinate of the axis, or this rank where it must be an
    `other`.
    """
    if not 0 <= peer < axis.size or (other and peer == axis.rank):
        raise PlanError(
            f"axis {axis.name} of size {axis.size}: coordinate {peer} is no peer of coordinate "
            f"{axis.rank}"
        )


def splits_of(axis: RankGroup, tensor: Tensor, splits: list[int] | None, side: str) -> list[int]:
    """The number of rows of `tensor` (rows, ...) for each rank: those given, or equal parts.

    Raises:
        PlanError: rows that do not divide, or splits that are not `size` counts of all rows.
    """
    rows = tensor.shape[0]
    if splits is None:
        if rows % axis.size:
            raise PlanError(
                f"all_to_all on axis {axis.name}: {rows} {side} rows do not divide by {axis.size}; "
                "give splits"
            )
        return [rows // axis.size] * axis.size
    if len(splits) != axis.size or sum(splits) != rows or min(splits) < 0:
        raise PlanError(
            f"all_to_all on axis {axis.name}: {side} splits {splits} must be {axis.size} counts "
            f"that sum to {rows} rows"
        )
    return list(splits)
