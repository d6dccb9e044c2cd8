"""The order of gathers is judged by three sums."""

from __future__ import annotations

import pytest

from plait.errors import ModelError, RankFailed, RunError
from plait.parallel.data.gather_order import GatherOrder


def order_of(*indices: int) -> GatherOrder:
    order = GatherOrder()
    for index in indices:
        order.add(index, f"layers.{index}")
    return order


def sums(*orders: GatherOrder) -> list[float]:
    return [sum(column) for column in zip(*(order.marks() for order in orders), strict=True)]


def test_equal_orders_pass() -> None:
    ranks = [order_of(0, 1, 2) for _ in range(1000)]
    ranks[0].check(sums(*ranks))


@pytest.mark.parametrize("other", [(0, 2, 1), (0, 1), (0, 1, 2, 2)])
def test_one_other_order_is_named(other: tuple[int, ...]) -> None:
    ranks = [order_of(0, 1, 2) for _ in range(1000)]
    with pytest.raises(ModelError, match=r"layers.0, layers.1, layers.2 \.\.\.; zero3 gathers"):
        ranks[0].check(sums(*ranks, order_of(*other)))


def test_an_empty_step_passes() -> None:
    order = order_of(1, 2)
    order.clear()
    order.check(sums(order, GatherOrder()))


def test_a_mismatch_names_the_layer() -> None:
    with pytest.raises(ModelError, match="gathers 'a'"), GatherOrder().naming("gathers 'a'"):
        raise RunError("other operations")


def test_a_lost_rank_stays_one() -> None:
    with pytest.raises(RankFailed), GatherOrder().naming("gathers 'a'"):
        raise RankFailed("gone")
