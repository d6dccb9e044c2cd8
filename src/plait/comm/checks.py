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


def contiguous(line: RankGroup, tensor: Tensor) -> Tensor:
    """The tensor without its graph: communication here is no operation of autograd
    (`transition` is).
    """
    if not tensor.is_contiguous():
        raise PlanError(
            f"axis {line.name}: a tensor of shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} is not contiguous; call .contiguous() first"
        )
    return tensor.detach()


def flat(line: RankGroup, op: str, part: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors as one dimension, where `full` has room for the part of every rank."""
    if full.numel() != line.size * part.numel() or full.dtype != part.dtype:
        raise PlanError(
            f"{op} on axis {line.name} of size {line.size}: the full tensor has {full.numel()} "
            f"{full.dtype}, the part {part.numel()} {part.dtype}; full must be {line.size} x part, "
            "of one dtype"
        )
    return contiguous(line, part).view(-1), contiguous(line, full).view(-1)


def check_shapes(line: RankGroup, op: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raise where a shape is not the expected one."""
    if tuple(found) != tuple(expected):
        raise PlanError(
            f"{op} on axis {line.name} of size {line.size}: shape {tuple(found)} must be "
            f"{tuple(expected)}"
        )


def check_peer(line: RankGroup, peer: int, other: bool = False) -> None:
    """Raise where `peer` is no coordinate of the axis, or this rank where it must be an `other`."""
    if not 0 <= peer < line.size or (other and peer == line.rank):
        raise PlanError(
            f"axis {line.name} of size {line.size}: coordinate {peer} is no peer of coordinate "
            f"{line.rank}"
        )


def splits_of(line: RankGroup, tensor: Tensor, splits: list[int] | None, side: str) -> list[int]:
    """The rows of `tensor` for each rank: those given, or equal parts."""
    rows = tensor.shape[0]
    if splits is None:
        if rows % line.size:
            raise PlanError(
                f"all_to_all on axis {line.name}: {rows} {side} rows do not divide by {line.size}; "
                "give splits"
            )
        return [rows // line.size] * line.size
    if len(splits) != line.size or sum(splits) != rows or min(splits) < 0:
        raise PlanError(
            f"all_to_all on axis {line.name}: {side} splits {splits} must be {line.size} counts "
            f"that sum to {rows} rows"
        )
    return list(splits)
