"""A piece: what one rank holds of one named global tensor. The unit of saving and of loading.

It says where its elements lie in the *global* tensor and nothing about ranks or strategies, which
is why a checkpoint does not depend on the plan that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.errors import CheckpointError
from plait.mesh.boxes import Box, FlatRange, Rectangle

RANDOM_PREFIX = (
    "random/"  # states of random generators, one tensor a rank: kept out of `check` and of exports
)


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop), in row-major order, of `box` of the tensor `name` of shape
    `global_shape`.

    `tensor` is 1-D of stop - start elements: read by `save`, written by `Checkpoint.fill`. It may
    be a view, on any device.

    Raises:
        CheckpointError: the box is outside the tensor, the range outside the box, or `tensor` has
        another size.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    tensor: Tensor

    def __post_init__(self) -> None:
        if not self.name:
            raise CheckpointError("a piece needs a name")
        if not self.box.fits(self.global_shape):
            raise CheckpointError(
                f"'{self.name}': {self.box} lies outside the shape {tuple(self.global_shape)}"
            )
        if not 0 <= self.start <= self.stop <= self.box.numel:
            raise CheckpointError(
                f"'{self.name}': [{self.start}, {self.stop}) is no range of the {self.box.numel} elements"
            )
        if tuple(self.tensor.shape) != (self.stop - self.start,):
            raise CheckpointError(
                f"'{self.name}': [{self.start}, {self.stop}) needs a tensor of shape ({self.stop - self.start},), "
                f"not {tuple(self.tensor.shape)}"
            )

    @staticmethod
    def whole(name: str, tensor: Tensor) -> Piece:
        """All elements of a contiguous tensor of any shape, () included; shares its memory."""
        return Piece.boxed(name, tensor.shape, Box.whole(tensor.shape), tensor)

    @staticmethod
    def boxed(name: str, global_shape: Sequence[int], box: Box, tensor: Tensor) -> Piece:
        """All elements of a box, from a contiguous tensor of the box's extent; shares its
        memory.
        """
        if tuple(tensor.shape) != box.extent:
            raise CheckpointError(
                f"'{name}': a box of extent {box.extent} needs that shape, not {tuple(tensor.shape)}"
            )
        if not tensor.is_contiguous():
            raise CheckpointError(
                f"'{name}' is not contiguous, so it has no flat view; pass a contiguous tensor"
            )
        return Piece(name, tuple(global_shape), box, 0, box.numel, tensor.detach().view(-1))

    @property
    def flat_range(self) -> FlatRange:
        """Where the elements lie, without their values."""
        return FlatRange(self.box, self.start, self.stop)

    def entry(self) -> dict[str, Any]:
        """The piece without its values, as JSON: what the file's header says of it."""
        return {
            "name": self.name,
            "shape": list(self.global_shape),
            "offset": list(self.box.offset),
            "extent": list(self.box.extent),
            "start": self.start,
            "stop": self.stop,
            "dtype": dtype_name(self.tensor.dtype),
        }


def view(tensor: Tensor, rectangle: Rectangle) -> Tensor:
    """The elements of one rectangle of a flat range, in the rectangle's shape, as a view of the
    range's 1-D tensor.
    """
    box = rectangle.box
    return tensor[rectangle.position : rectangle.position + box.numel].view(box.extent)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
