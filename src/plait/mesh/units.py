"""Units of a tensor: equal blocks of its rows, such as heads or experts, each a matrix of its own.

A rank's part is a range of elements in row-major order, so its elements of a unit follow each
other. A unit that lies inside the part needs nothing of other ranks. Pure: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from plait.mesh.boxes import Box
from plait.mesh.matrices import MatrixPlace


@dataclass(frozen=True)
class UnitPart:
    """The elements of one unit inside a part of its tensor.

    Attributes:
        tensor: the name of the tensor.
        index: of the unit, from the first row on.
        place: of the elements in the unit, whose name is the unit's.
        offset: of the first of them in the part.
    """

    tensor: str
    index: int
    place: MatrixPlace
    offset: int

    @property
    def span(self) -> slice:
        """The elements in the part."""
        return slice(self.offset, self.offset + self.place.numel)


def units_of(place: MatrixPlace, count: int) -> list[UnitPart]:
    """The elements of each of `count` units inside a part; a single unit keeps the tensor's name.

    Raises:
        ValueError: `count` does not divide the rows, or units lie across fused blocks of them.
    """
    if count == 1:
        return [UnitPart(place.name, 0, place, 0)]
    if not place.shape or place.shape[0] % count:
        raise ValueError(f"the shape {place.shape} of '{place.name}' has no {count} equal parts")
    found = [part for block, at in _blocks(place) for part in _cut(block, at, count)]
    if len({part.index for part in found}) < len(found):
        raise ValueError(
            f"'{place.name}' is fused of {place.view}, and {count} equal parts of its rows lie "
            "across these"
        )
    return found


def _blocks(place: MatrixPlace) -> Iterator[tuple[MatrixPlace, int]]:
    """The place without a view of fused rows: one for each fused block, and where it begins."""
    view = place.view
    if view is None or view[0] == place.shape[0]:
        yield place, 0
        return
    offset, extent = place.box.offset, place.box.extent
    numel = math.prod(extent[1:])
    for index in range(extent[0]):
        low = max(place.start, index * numel)
        high = min(place.stop, (index + 1) * numel)
        if low < high:
            row = (offset[0] + index) * view[1] + offset[1]
            box = Box((row, *offset[2:]), extent[1:])
            start, stop = low - index * numel, high - index * numel
            yield MatrixPlace(place.name, place.shape, box, start, stop), low - place.start


def _cut(place: MatrixPlace, at: int, count: int) -> Iterator[UnitPart]:
    """The units of a place whose first dimension is the tensor's rows; `at` begins it."""
    rows = place.shape[0] // count
    first, extent = place.box.offset[0], place.box.extent
    row = math.prod(extent[1:])
    for index in range(count):
        low = max(first, index * rows)
        high = min(first + extent[0], (index + 1) * rows)
        base = (low - first) * row
        start = max(place.start, base)
        stop = min(place.stop, (high - first) * row)
        if low >= high or start >= stop:
            continue
        box = Box((low - index * rows, *place.box.offset[1:]), (high - low, *extent[1:]))
        view = None if place.view is None else (rows, *place.view[1:])
        name = f"{place.name}[{index}]"
        shape = (rows, *place.shape[1:])
        unit = MatrixPlace(name, shape, box, start - base, stop - base, view)
        yield UnitPart(place.name, index, unit, at + start - place.start)
