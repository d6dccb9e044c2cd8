"""The sums of a step say, without a read, whether it may update."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plait.engine.sums import StepSums, SumsLayout, totals_of, unused
from plait.parallel.data.gather_order import GatherOrder

GOOD = (3.0, 4.0, 2.0, 4.0)
"""Loss, count, squared norm and tokens of one rank."""


def order_of(*indices: int) -> GatherOrder:
    order = GatherOrder()
    for index in indices:
        order.add(index, f"layers.{index}")
    return order


def summed(*ranks: tuple[tuple[float, ...], float, GatherOrder]) -> tuple[Tensor, SumsLayout]:
    """The sums over ranks, each with its totals, its graphs and its order of gathers."""
    layouts = [SumsLayout([True, False], [order], rounds=False) for *_, order in ranks]
    rows = [
        [*totals, *layout.numbers(graphs)]
        for (totals, graphs, _), layout in zip(ranks, layouts, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).sum(0), layouts[0]


def is_sound(values: Tensor, layout: SumsLayout) -> bool:
    return bool(StepSums(values, layout, torch.zeros(())).sound())


@pytest.mark.parametrize(
    ("totals", "graphs", "sound"),
    [
        (GOOD, 1.0, True),
        ((math.nan, 4.0, 2.0, 4.0), 1.0, False),
        ((3.0, 4.0, math.inf, 4.0), 1.0, False),
        ((0.0, 0.0, 0.0, 0.0), 1.0, False),
        (GOOD, 0.0, False),
    ],
)
def test_a_step_may_update(totals: tuple[float, ...], graphs: float, sound: bool) -> None:
    assert is_sound(*summed((totals, graphs, order_of(0, 1)))) is sound


def test_ranks_that_gather_in_other_orders_may_not() -> None:
    alike, layout = summed((GOOD, 1.0, order_of(0, 1)), (GOOD, 1.0, order_of(0, 1)))
    layout.note_orders(alike)
    assert is_sound(alike, layout) and totals_of(alike.tolist()).num_graphs == 2
    crossed, layout = summed((GOOD, 1.0, order_of(0, 1)), (GOOD, 1.0, order_of(1, 0)))
    layout.note_orders(crossed)
    assert not is_sound(crossed, layout)
    crossed[:5] += alike[:5]  # another stage adds its own
    assert not is_sound(crossed, layout)


def test_a_parameter_that_no_rank_used_is_named() -> None:
    values, layout = summed((GOOD, 1.0, order_of()), (GOOD, 1.0, order_of()))
    assert unused(values.tolist(), layout) == [1]
