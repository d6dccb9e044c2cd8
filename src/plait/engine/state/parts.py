"""What one rank holds of each parameter or gradient, as ranges of elements: the form that proof and
checkpoints share.

The tensor axis gives a rank a box of a tensor; the data axis a range of that box's elements, in
row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.engine.state.holding import Holding
from plait.mesh.boxes import Box, FlatRange
from plait.parallel.data import DataStrategy
from plait.parallel.tensor import Placement

Placements = Mapping[str, Placement]


@dataclass(frozen=True)
class LocalPart:
    """Elements [start, stop), in row-major order, of a box of the tensor `name` of shape
    `global_shape`; `value` is 1-D.

    The box is one of the tensor's `view`: its shape, or where parts were fused, the same elements
    with one more dimension.
    """

    name: str
    global_shape: tuple[int, ...]
    start: int
    stop: int
    value: Tensor
    view: tuple[int, ...]
    box: Box

    @property
    def is_flat(self) -> bool:
        """Whether [start, stop) counts in the whole tensor."""
        return self.box.extent == self.view

    def index(self) -> slice | Tensor:
        """Where the elements lie in the flat whole tensor: a range, or one number for each (for
        proofs: 8 bytes an element).
        """
        if self.is_flat:
            return slice(self.start, self.stop)
        numbers = torch.arange(math.prod(self.view)).view(self.view)
        return numbers[self.box.within(Box.whole(self.view))].reshape(-1)[self.start : self.stop]

    def boxed(self) -> Iterator[tuple[Box, int, int, Tensor]]:
        """(box of `global_shape`, start, stop, view of the values): one, or several where parts
        were fused.
        """
        if self.view == self.global_shape:
            yield self.box, self.start, self.stop, self.value
            return
        fused = next(dim for dim, size in enumerate(self.global_shape) if size != self.view[dim])
        size = self.view[fused + 1]
        for rectangle in FlatRange(self.box, self.start, self.stop).rectangles():
            offset = rectangle.box.offset
            extent = rectangle.box.extent
            rows = math.prod(extent[:fused])
            inner = math.prod(extent[fused + 1 :])
            values = self.value[rectangle.position : rectangle.position + rectangle.box.numel].view(
                rows, extent[fused], inner
            )
            for number in range(extent[fused]):
                start = (offset[fused] + number) * size + offset[fused + 1]
                box = Box(
                    (*offset[:fused], start, *offset[fused + 2 :]),
                    (*extent[:fused], extent[fused + 1], *extent[fused + 2 :]),
                )
                yield box, 0, box.numel, values[:, number]

    def share(self, index: int, count: int) -> LocalPart:
        """Part `index` of `count` parts of (nearly) equal length."""
        numel = self.stop - self.start
        low = index * numel // count
        high = (index + 1) * numel // count
        start = self.start + low
        stop = self.start + high
        return LocalPart(
            self.name, self.global_shape, start, stop, self.value[low:high], self.view, self.box
        )


@dataclass(frozen=True)
class Shapes:
    """The shape of each whole tensor, and the box of this rank."""

    placements: Placements

    def copies(self, name: str) -> tuple[int, int]:
        """(which, of how many) ranks of the tensor axis that hold the same elements."""
        placement = self.placements.get(name)
        return (0, 1) if placement is None else (placement.copy, placement.copies)

    def part(
        self, name: str, local_shape: tuple[int, ...], start: int, stop: int, value: Tensor
    ) -> LocalPart:
        placement = self.placements.get(name)
        if placement is None:
            return LocalPart(
                name, local_shape, start, stop, value, local_shape, Box.whole(local_shape)
            )
        return LocalPart(name, placement.shape, start, stop, value, placement.view, placement.box)

    def whole(self, name: str, tensor: Tensor) -> LocalPart:
        return self.part(name, tuple(tensor.shape), 0, tensor.numel(), tensor.detach().reshape(-1))


def local_parameters(strategy: DataStrategy, holding: Holding) -> list[LocalPart]:
    """Every parameter that this rank holds or shares in, trainable ones in master precision."""
    shapes = Shapes(holding.placements)
    parts = [
        shapes.part(
            piece.name,
            tuple(piece.part.slot.shape),
            piece.part.start,
            piece.part.stop,
            piece.value.detach().reshape(-1),
        )
        for piece in strategy.pieces
    ]
    return [*parts, *local_frozen(strategy, holding)]


def local_frozen(strategy: DataStrategy, holding: Holding) -> list[LocalPart]:
    """The parameters that no optimizer updates."""
    shapes = Shapes(holding.placements)
    sharded = strategy.frozen_pieces()
    if strategy.frozen_states:
        return [
            shapes.part(
                piece.name,
                tuple(piece.part.slot.shape),
                piece.part.start,
                piece.part.stop,
                piece.value,
            )
            for piece in sharded
        ]
    return [
        shapes.whole(name, param)
        for name, param in holding.params.items()
        if not param.requires_grad
    ]


def local_replicas(holding: Holding) -> list[LocalPart]:
    """The parameters as the modules have them, where they have memory."""
    shapes = Shapes(holding.placements)
    return [
        shapes.whole(name, param)
        for name, param in holding.params.items()
        if param.untyped_storage().nbytes() > 0
    ]


def local_buffers(holding: Holding) -> list[LocalPart]:
    """The buffers of this rank's modules that are part of the model's state."""
    return [Shapes({}).whole(name, buffer) for name, buffer in holding.buffers().items()]


def local_gradients(strategy: DataStrategy, divisor: float, holding: Holding) -> list[LocalPart]:
    """The gradients that this rank's optimizer will see, divided by `divisor`; parameters without
    one are left out.
    """
    return list(_gradients(strategy, divisor, Shapes(holding.placements)))


def _gradients(strategy: DataStrategy, divisor: float, shapes: Shapes) -> Iterator[LocalPart]:
    for piece in strategy.pieces:
        grad = piece.value.grad
        if grad is not None:
            shape = tuple(piece.part.slot.shape)
            part = piece.part
            yield shapes.part(
                piece.name, shape, part.start, part.stop, grad.detach().reshape(-1) / divisor
            )
