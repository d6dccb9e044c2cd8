"""Which of torch's two libraries multiplies quicker on this processor: measured, class by class.

Both take turns on the same matrices, round by round. oneDNN gets a class only where it is clearly
quicker in both shapes that stand for the class. The first of them lies at the class's lower edge,
where oneDNN's longer start weighs most. A tie is torch's. Where repeats of one product differ too
much, torch gets the class. The machine is busy then, and the result is not to be saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import NamedTuple

import torch
from torch import Tensor

from plait.cluster.products import (
    CLASSES,
    FORWARD,
    INPUT_GRAD,
    MULTIPLICATIONS,
    RULE,
    TORCH,
    ProductClass,
    ProductConditions,
    ProductTable,
    Ratio,
    processor_name,
)
from plait.products import Products, operations

FEWEST_ROUNDS = 3
MOST_ROUNDS = 7
CLEAR = 0.97
"""oneDNN must take less than this share of torch's time."""
SPREAD = 1.25
"""Between the quartiles of a steady product's times."""
MOST_UNSTEADY = 3
"""Shapes whose repeats may differ before the machine counts as busy."""
SHORTEST_SECONDS = 5e-4
"""A turn multiplies so often that it lasts as long, as shorter ones are the clock's noise."""
TOP_BITS = MULTIPLICATIONS[-1].bit_length() - 1


class Shape(NamedTuple):
    """A layer: rows of its input, features in and out."""

    rows: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Times:
    """Seconds of one product with either library, one number a round."""

    torch: Sequence[float]
    onednn: Sequence[float]

    @property
    def ratio(self) -> Ratio:
        """Lower quartile, median and upper quartile of oneDNN's time over torch's, by rounds."""
        ratios = [one / other for one, other in zip(self.onednn, self.torch, strict=True)]
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        return low, median(ratios), high

    @property
    def is_steady(self) -> bool:
        """Whether the repeats of each library agree."""
        for seconds in (self.torch, self.onednn):
            low, _, high = quantiles(seconds, n=4, method="inclusive")
            if high > SPREAD * low:
                return False
        return True

    @property
    def is_decided(self) -> bool:
        """Whether all rounds agree on the quicker library."""
        wins = [one < CLEAR * other for one, other in zip(self.onednn, self.torch, strict=True)]
        return all(wins) or not any(wins)


@dataclass(frozen=True)
class Measurement:
    """The table that was found; where the machine was busy it is torch's own and not to be kept."""

    table: ProductTable
    is_steady: bool
    seconds: float


def this_machine() -> ProductConditions:
    """The circumstances of a measurement made now."""
    return ProductConditions(processor_name(), torch.__version__, torch.get_num_threads())


def shapes_of(one: ProductClass) -> tuple[Shape, ...]:
    """The layers that stand for a class: its lower edge, and one of more rows and more work.

    The largest class has its lower edge alone, as more would take too long.
    """
    bits = one.multiplications.bit_length() - 1
    edge = _shape(one.rows, bits, wide=True)
    return (edge,) if bits == TOP_BITS else (edge, _shape(4 * one.rows, bits + 1, wide=False))


def _shape(rows: int, bits: int, *, wide: bool) -> Shape:
    """Features that make 2^bits multiplications, about four times as many on one side."""
    both = bits - (rows.bit_length() - 1)
    small = (both - 1) // 2
    sides = 1 << small, 1 << (both - small)
    return Shape(rows, *sides) if wide else Shape(rows, *sides[::-1])


Measure = Callable[[ProductClass, Shape], Times]


def measure(timed: Measure | None = None, classes: Sequence[ProductClass] = CLASSES) -> Measurement:
    """Measure every class, on this process's number of threads.

    `timed` gives the times of one product; without it they are measured until rounds agree, and a
    busy machine ends it.
    """
    began = time.perf_counter()
    onednn: set[ProductClass] = set()
    ratios: dict[ProductClass, Ratio] = {}
    unsteady = 0
    for one in classes if operations() or timed else ():
        times_of_shapes = [(timed or time_product)(one, shape) for shape in shapes_of(one)]
        unsteady += sum(not times.is_steady for times in times_of_shapes)
        if unsteady > MOST_UNSTEADY:
            return Measurement(TORCH, False, time.perf_counter() - began)
        worst = max((times.ratio for times in times_of_shapes), key=lambda ratio: ratio[2])
        ratios[one] = worst
        if all(times.is_steady for times in times_of_shapes) and worst[2] < CLEAR:
            onednn.add(one)
    return Measurement(ProductTable(frozenset(onednn), ratios), True, time.perf_counter() - began)


def time_product(one: ProductClass, shape: Shape, *, rounds: int | None = None) -> Times:
    """Take turns for so many `rounds`; without a number until they agree, and at most `MOST_ROUNDS`
    times.
    """
    with torch.no_grad():
        both = [_product(Products(table), one.kind, shape) for table in (TORCH, RULE)]
        repeats = max(1, round(SHORTEST_SECONDS / _seconds(both[0], 2)))
        _seconds(both[1], 2)  # oneDNN compiles its kernel
        times = Times([], [])
        while not _is_enough(times, rounds):
            seconds = [_seconds(product, repeats) for product in both]
            times = Times([*times.torch, seconds[0]], [*times.onednn, seconds[1]])
    return times


def _is_enough(times: Times, rounds: int | None) -> bool:
    done = len(times.torch)
    if rounds is not None:
        return done >= rounds
    if done < FEWEST_ROUNDS:
        return False
    return (times.is_decided and times.is_steady) or done >= MOST_ROUNDS


def _product(products: Products, kind: str, shape: Shape) -> Callable[[], Tensor]:
    x, grad, weight = (
        torch.full(size, 0.5)
        for size in (
            (shape.rows, shape.inputs),
            (shape.rows, shape.outputs),
            (shape.outputs, shape.inputs),
        )
    )
    if kind == FORWARD:
        return lambda: products.linear(x, weight, None)
    if kind == INPUT_GRAD:
        return lambda: products.product(grad, weight)
    return lambda: products.weight_grad(grad.t(), x)


def _seconds(product: Callable[[], Tensor], repeats: int) -> float:
    """Seconds of one product. A single thread's are its own, which other processes do not
    lengthen.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    for _ in range(repeats):
        product()
    return (clock() - began) / repeats
