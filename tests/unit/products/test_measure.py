"""Which library gets a class: the clearly quicker one, torch's own in doubt, and none when busy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from plait.cluster.products import CLASSES, TORCH, ProductClass
from plait.products import measure as measuring
from plait.products.measure import CLEAR, Shape, Times, measure, shapes_of, time_product

STEADY = (1.0, 1.0, 1.01, 1.0, 1.02)
BUSY = (1.0, 1.6, 1.0, 2.5, 1.1)


def table(ratio: float, own: Sequence[float] = STEADY) -> measuring.Measurement:
    def timed(one: ProductClass, shape: Shape) -> Times:
        return Times(own, [ratio * seconds for seconds in own])

    return measure(timed)


@pytest.mark.parametrize("one", CLASSES, ids=str)
def test_shapes_lie_in_their_class_and_the_first_at_its_lower_edge(one: ProductClass) -> None:
    edge, *others = shapes_of(one)
    assert edge.rows == one.rows
    assert edge.rows * edge.inputs * edge.outputs == one.multiplications
    for shape in others:
        assert shape.rows > one.rows
        assert shape.rows * shape.inputs * shape.outputs == 2 * one.multiplications
        assert shape.inputs > shape.outputs


@pytest.mark.parametrize(
    ("ratio", "num"), [(0.6, len(CLASSES)), (0.96, len(CLASSES)), (CLEAR, 0), (1.0, 0), (1.3, 0)]
)
def test_only_the_clearly_quicker_library_gets_a_class(ratio: float, num: int) -> None:
    found = table(ratio)
    assert found.is_steady
    assert len(found.table.onednn) == num
    assert found.table.ratios.keys() == set(CLASSES)


def test_a_busy_machine_takes_torchs_own_and_keeps_nothing() -> None:
    found = table(0.5, BUSY)
    assert not found.is_steady
    assert found.table == TORCH


def test_one_slower_shape_leaves_the_class_to_torch() -> None:
    def timed(one: ProductClass, shape: Shape) -> Times:
        slower = shape == shapes_of(one)[0] and one.rows == 16
        return Times(STEADY, [(1.1 if slower else 0.5) * seconds for seconds in STEADY])

    found = measure(timed).table.onednn
    assert found == {one for one in CLASSES if one.rows > 16}


def test_one_unsteady_product_leaves_its_class_to_torch_alone() -> None:
    def timed(one: ProductClass, shape: Shape) -> Times:
        own = BUSY if (one, shape) == (CLASSES[0], shapes_of(CLASSES[0])[0]) else STEADY
        return Times(own, [0.5 * seconds for seconds in own])

    found = measure(timed)
    assert found.is_steady
    assert found.table.onednn == set(CLASSES[1:])


@pytest.mark.parametrize("one", CLASSES[:3], ids=str)
def test_real_products_are_timed_in_turns(one: ProductClass) -> None:
    times = time_product(one, Shape(16, 8, 8))
    assert measuring.FEWEST_ROUNDS <= len(times.torch) <= measuring.MOST_ROUNDS
    assert len(times.onednn) == len(times.torch)
    assert min(*times.torch, *times.onednn) > 0
    assert torch.is_grad_enabled()
