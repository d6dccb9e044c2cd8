"""Which elements of a global tensor: boxes, and ranges of the elements of a box in row-major order.

A tensor axis gives a rank a box of the tensor; ZeRO gives it a flat range of that box. A flat range
is a handful of rectangles (a ragged head, whole rows, a ragged tail, in every dim). Rectangles can
be intersected and subtracted. That is all that resharding needs. Pure: no torch.

    box of extent (4, 5), range [3, 13)      . . . h h      3 rectangles = 2 * ndim - 1
                                             m m m m m
                                             t t t . .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub


@dataclass(frozen=True)
class Box:
    """The elements x with offset[d] <= x[d] < offset[d] + extent[d] in every dim d; of a 0-dim
    tensor, its one element.
    """

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.extent) or min((*self.offset, *self.extent), default=0) < 0:
            raise ValueError(f"offset {self.offset} and extent {self.extent} are no box")

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of all elements of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.extent)

    @property
    def end(self) -> tuple[int, ...]:
        """The first index after the box in every dim, as Python's slices count."""
        return tuple(map(add, self.offset, self.extent))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this shape."""
        return len(shape) == len(self.offset) and all(
            end <= size for end, size in zip(self.end, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The elements of both; None when there are none."""
        offset = tuple(map(max, self.offset, other.offset))
        extent = tuple(map(sub, map(min, self.end, other.end), offset))
        return Box(offset, extent) if min(extent, default=1) > 0 else None

    def subtract(self, inner: Box) -> list[Box]:
        """The elements outside `inner`, a box within this one: at most two boxes a dim,
        disjoint.
        """
        outside: list[Box] = []
        offset = list(self.offset)
        end = list(self.end)
        for dim, (start, stop) in enumerate(zip(inner.offset, inner.end, strict=True)):
            for low, high in ((offset[dim], start), (stop, end[dim])):
                if low < high:
                    lows = [*offset]
                    highs = [*end]
                    lows[dim], highs[dim] = low, high
                    outside.append(
                        Box(tuple(lows), tuple(b - a for a, b in zip(lows, highs, strict=True)))
                    )
            offset[dim], end[dim] = start, stop
        return outside

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of these elements in a tensor that holds exactly `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offset, outer.offset, self.extent, strict=True)
        )


@dataclass(frozen=True)
class Rectangle:
    """A box, in global coordinates, whose elements follow each other in a flat range from
    `position` on.
    """

    box: Box
    position: int


@dataclass(frozen=True)
class FlatRange:
    """The elements [start, stop) of a box, counted in row-major order inside the box."""

    box: Box
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.box.numel:
            raise ValueError(
                f"[{self.start}, {self.stop}) is no range of the {self.box.numel} elements of "
                f"{self.box}"
            )

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    def rectangles(self) -> list[Rectangle]:
        """The fewest rectangles that make up the range, in its order: at most 2 * ndim - 1, and one
        for 0 dims.

        Each is contiguous in the range, so it is a view of the range's 1-D tensor.
        """
        pieces = []
        position = 0
        for box in _cut(self.box.extent, self.start, self.stop):
            shifted = tuple(base + at for base, at in zip(self.box.offset, box.offset, strict=True))
            pieces.append(Rectangle(Box(shifted, box.extent), position))
            position += box.numel
        return pieces


def _cut(extent: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes, relative to the extent, of its elements [start, stop)."""
    if start == stop:
        return
    if not extent:
        yield Box((), ())
        return
    row = math.prod(extent[1:])
    inner = extent[1:]
    first = -(-start // row)
    last = stop // row  # the whole rows are [first, last)
    if first > last:  # inside one row
        yield from _in_row(last, inner, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(first - 1, inner, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    if last * row < stop:
        yield from _in_row(last, inner, 0, stop - last * row)


def _in_row(index: int, inner: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for box in _cut(inner, start, stop):
        yield Box((index, *box.offset), (1, *box.extent))
