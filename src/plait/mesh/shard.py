"""A shard: the elements of a named tensor that one rank holds, and their values.

Saving, loading, initial values and proofs all speak of shards. A shard says where its elements lie
in the *global* tensor, and nothing about ranks or strategies. So a checkpoint made of shards does
not depend on the plan that wrote it. Values are torch tensors; importing this file needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from plait.mesh.boxes import Box, FlatRange

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """The elements [start, stop), in row-major order, of a box of one tensor.

    A tensor axis gives a rank the box; the data axis gives it a range of the box's elements.

    Attributes:
        name: the tensor's name.
        global_shape: the shape of the whole tensor.
        box: the box of the whole tensor, or of its `view`.
        start: the first element, counted inside the box.
        stop: one past the last element.
        values: a 1-D tensor of stop - start elements, on any device; it may be a view.
        view: the whole tensor's shape with fused dimensions apart, such as the q, k and v of one
            matrix. None where nothing is fused.

    Raises:
        ValueError: the box lies outside the tensor, the range outside the box, or `values` has
            another size.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    values: Tensor
    view: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a shard needs a name")
        if not self.box.fits(self.box_shape):
            raise ValueError(f"'{self.name}': {self.box} lies outside the shape {self.box_shape}")
        if not 0 <= self.start <= self.stop <= self.box.numel:
            raise ValueError(
                f"'{self.name}': [{self.start}, {self.stop}) is no range of the "
                f"{self.box.numel} elements"
            )
        if tuple(self.values.shape) != (self.numel,):
            raise ValueError(
                f"'{self.name}': [{self.start}, {self.stop}) needs a tensor of shape "
                f"({self.numel},), not {tuple(self.values.shape)}"
            )

    @staticmethod
    def whole(name: str, tensor: Tensor) -> Shard:
        """All elements of a contiguous tensor of any shape, () included; shares its memory."""
        return Shard.of_box(name, tensor.shape, Box.whole(tensor.shape), tensor)

    @staticmethod
    def of_box(name: str, global_shape: Sequence[int], box: Box, tensor: Tensor) -> Shard:
        """All elements of a box, from a contiguous tensor of the shape of its extent; shares its
        memory.

        Raises:
            ValueError: another shape, or a tensor that is not contiguous.
        """
        if tuple(tensor.shape) != box.extent:
            raise ValueError(
                f"'{name}': a box of extent {box.extent} needs that shape, "
                f"not {tuple(tensor.shape)}"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"'{name}' is not contiguous, so it has no flat view; pass a contiguous tensor"
            )
        return Shard(name, tuple(global_shape), box, 0, box.numel, tensor.detach().view(-1))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The shape that the box is a box of."""
        return self.global_shape if self.view is None else self.view

    @property
    def flat_range(self) -> FlatRange:
        """The place of the elements, without their values."""
        return FlatRange(self.box, self.start, self.stop)

    def like(self, name: str, tensor: Tensor) -> Shard:
        """A shard of another tensor at this place: a gradient, or a moment of the optimizer. That
        has `numel` elements, and any shape.
        """
        return replace(self, name=name, values=tensor.detach().reshape(-1))

    def share(self, index: int, count: int) -> Shard:
        """Share `index` of `count` shares of (nearly) equal length."""
        low = index * self.numel // count
        high = (index + 1) * self.numel // count
        values = self.values[low:high]
        return replace(self, start=self.start + low, stop=self.start + high, values=values)

    def index(self) -> slice | Tensor:
        """The index of the elements in the flat whole tensor.

        A range where they follow each other; else a number for each, which takes 8 bytes an
        element: for proofs.
        """
        shape = self.box_shape
        if self.box.extent == shape:
            return slice(self.start, self.stop)
        import torch

        numbers = torch.arange(math.prod(shape)).view(shape)
        return numbers[self.box.within(Box.whole(shape))].reshape(-1)[self.start : self.stop]

    def boxed(self) -> Iterator[Shard]:
        """Shards of these elements without a `view`: one, or several where dimensions are fused."""
        for place, values in self._places():
            yield self._at(place, values.reshape(-1))

    def fill(self, write: Callable[[Shard], None]) -> None:
        """Let `write` set the values of each shard of `boxed`, and take them over into these."""
        for place, values in self._places():
            flat = values.reshape(-1)
            write(self._at(place, flat))
            if flat.data_ptr() != values.data_ptr():  # a copy, as no flat view exists
                values.copy_(flat.view_as(values))

    def _at(self, place: FlatRange, values: Tensor) -> Shard:
        return Shard(self.name, self.global_shape, place.box, place.start, place.stop, values)

    def _places(self) -> Iterator[tuple[FlatRange, Tensor]]:
        """Ranges of boxes of the whole tensor, each with its elements as a view of the values."""
        shape = self.box_shape
        if shape == self.global_shape:
            yield self.flat_range, self.values
            return
        groups = _groups(shape, self.global_shape)
        outer = [dim for group in groups for dim in group[:-1]]
        for rectangle in self.flat_range.rectangles():
            offset = rectangle.box.offset
            extent = rectangle.box.extent
            flat = self.values[rectangle.position : rectangle.position + rectangle.box.numel]
            values = flat.view(extent)
            for numbers in product(*(range(extent[dim]) for dim in outer)):
                at = dict(zip(outer, numbers, strict=True))
                first = [low + at.get(dim, 0) for dim, low in enumerate(offset)]
                starts = tuple(_start(shape, group, first) for group in groups)
                box = Box(starts, tuple(extent[group[-1]] for group in groups))
                index = tuple(at.get(dim, slice(None)) for dim in range(len(shape)))
                yield FlatRange(box, 0, box.numel), values[index]


def _groups(view: Sequence[int], shape: Sequence[int]) -> list[list[int]]:
    """For each dimension of a shape, the dimensions of its view that it is made of."""
    groups: list[list[int]] = []
    dim = 0
    for size in shape:
        group = [dim]
        while math.prod(view[one] for one in group) != size:
            group.append(group[-1] + 1)
        groups.append(group)
        dim = group[-1] + 1
    return groups


def _start(view: Sequence[int], group: Sequence[int], index: Sequence[int]) -> int:
    """The place in one dimension of the element at `index` of a view, of whose dimensions `group`
    it is made.
    """
    place = 0
    for dim in group:
        place = place * view[dim] + index[dim]
    return place
