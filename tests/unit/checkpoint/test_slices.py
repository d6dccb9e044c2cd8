"""Boxes and flat ranges against numpy: an array whose elements are their own flat indices cannot
lie about who is where.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.mesh.boxes import Box, FlatRange

EXTENTS = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], FlatRange]:
    """A shape, and a flat range of a box inside it."""
    shape = draw(EXTENTS)
    return shape, draw(ranges_in(shape))


@st.composite
def ranges_in(draw: st.DrawFn, shape: tuple[int, ...]) -> FlatRange:
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    box = Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
    start, stop = sorted((draw(st.integers(0, box.numel)), draw(st.integers(0, box.numel))))
    return FlatRange(box, start, stop)


def indices(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


def at(array: np.ndarray, box: Box) -> np.ndarray:
    return array[box.within(Box.whole(array.shape))]


@given(ranges())
def test_the_rectangles_are_the_range_in_its_order(case: tuple[tuple[int, ...], FlatRange]) -> None:
    shape, flat = case
    expected = at(indices(shape), flat.box).reshape(-1)[flat.start : flat.stop]
    found = []
    position = 0
    for rectangle in flat.rectangles():
        assert rectangle.position == position
        assert rectangle.box.fits(shape)
        elements = at(indices(shape), rectangle.box).reshape(-1)
        found.append(elements)
        position += elements.size
    assert np.array_equal(np.concatenate([[], *found]), expected)
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(1, 3), max_size=3).map(tuple), st.data())
def test_no_fewer_rectangles_would_do(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = int(np.prod(shape, dtype=int))
    start, stop = sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))))
    array = indices(shape)

    def is_box(low: int, high: int) -> bool:
        where = np.argwhere((array >= low) & (array < high)).reshape(high - low, len(shape))
        return int(np.prod(where.max(0) - where.min(0) + 1, dtype=int)) == high - low

    @cache
    def fewest(low: int) -> int:
        return (
            0
            if low == stop
            else min(1 + fewest(high) for high in range(low + 1, stop + 1) if is_box(low, high))
        )

    assert len(FlatRange(Box.whole(shape), start, stop).rectangles()) == fewest(start)


def all_boxes(shape: tuple[int, ...]) -> list[Box]:
    sides = [
        [(low, high - low) for low in range(size) for high in range(low, size + 1)]
        for size in shape
    ]
    return [
        Box(tuple(low for low, _ in side), tuple(size for _, size in side))
        for side in itertools.product(*sides)
    ]


@pytest.mark.parametrize("shape", [(), (4,), (3, 3), (2, 1, 2)])
def test_intersect_and_subtract_part_every_box_by_every_other(shape: tuple[int, ...]) -> None:
    elements = {
        box: [int(element) for element in at(indices(shape), box).flat] for box in all_boxes(shape)
    }
    for one, other in itertools.product(elements, repeat=2):
        both = sorted(set(elements[one]) & set(elements[other]))
        shared = one.intersect(other)
        assert both == ([] if shared is None else elements[shared])
        if shared is not None:
            rest = one.subtract(shared)
            assert (
                sorted([*both, *(element for box in rest for element in elements[box])])
                == elements[one]
            )
            assert len(rest) <= 2 * len(shape)


def test_a_scalar_is_one_rectangle() -> None:
    assert [r.box for r in FlatRange(Box.whole(()), 0, 1).rectangles()] == [Box((), ())]
    assert FlatRange(Box.whole(()), 0, 0).rectangles() == []


def test_the_picture_of_the_module() -> None:
    boxes = [
        (r.box.offset, r.box.extent, r.position)
        for r in FlatRange(Box.whole((4, 5)), 3, 13).rectangles()
    ]
    assert boxes == [((0, 3), (1, 2), 0), ((1, 0), (1, 5), 2), ((2, 0), (1, 3), 7)]


@pytest.mark.parametrize("bad", [((0,), (1, 1)), ((-1,), (2,)), ((0,), (-1,))])
def test_what_is_no_box(bad: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="are no box"):
        Box(*bad)


@pytest.mark.parametrize("bad", [(-1, 2), (3, 2), (0, 7)])
def test_what_is_no_range(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is no range"):
        FlatRange(Box.whole((2, 3)), *bad)
