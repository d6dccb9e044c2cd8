"""Placement of experts: every expert lives somewhere, ranks are as even as the loads allow."""

from __future__ import annotations

import itertools
import random

import pytest

from plait.errors import PlanError
from plait.parallel.expert.placement import in_order, place


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_slots", "num_nodes"),
    [(8, 4, 8, 1), (8, 4, 12, 1), (16, 8, 24, 2)],
)
def test_every_expert_has_a_place_and_hot_ones_several(
    num_experts: int, num_ranks: int, num_slots: int, num_nodes: int, seed: int
) -> None:
    chance = random.Random(seed)
    load = [chance.paretovariate(1.2) for _ in range(num_experts)]
    placement = place(load, num_ranks, num_slots=num_slots, num_nodes=num_nodes)
    assert len(placement.experts) == num_ranks
    assert {len(rank) for rank in placement.experts} == {num_slots // num_ranks}
    assert placement.copies.keys() == set(range(num_experts))
    assert placement.imbalance(load) <= in_order(num_experts, num_ranks).imbalance(load) + 1e-9
    assert sum(placement.rank_loads(load)) == pytest.approx(sum(load))


def test_replication_flattens_one_hot_expert() -> None:
    load = [70.0, 10, 10, 10]
    assert place(load, 4).imbalance(load) == pytest.approx(2.8)
    assert place(load, 4, num_slots=8).copies[0] == 5
    assert place(load, 4, num_slots=8).imbalance(load) < 1.2


def test_packing_is_close_to_the_best_of_all() -> None:
    load = [9.0, 7, 6, 5, 4, 2]
    best = min(
        max(sum(load[i] for i in half), sum(load) - sum(load[i] for i in half))
        for half in itertools.combinations(range(6), 3)
    )
    assert max(place(load, 2).rank_loads(load)) <= best * 7 / 6  # Graham's bound for two machines


@pytest.mark.parametrize(("num_ranks", "num_slots", "num_nodes"), [(4, 6, 1), (4, 4, 1), (4, 8, 3)])
def test_what_does_not_fit_is_refused(num_ranks: int, num_slots: int, num_nodes: int) -> None:
    with pytest.raises(PlanError):
        place([1.0] * 8, num_ranks, num_slots=num_slots, num_nodes=num_nodes)


def test_groups_stay_on_a_node() -> None:
    load = [float(1 + expert % 5) for expert in range(16)]
    placement = place(load, 4, num_slots=24, num_nodes=2, num_groups=4)
    for ranks in (placement.experts[:2], placement.experts[2:]):
        groups = {expert // 4 for rank in ranks for expert in rank}
        assert len(groups) == 2


def test_what_is_balanced_already_stays_at_home() -> None:
    assert place([1.0] * 8, 4).imbalance([1.0] * 8) == 1.0
    load = [5.0, 1, 1, 5, 5, 1, 1, 5]  # contiguous pairs are even
    moved = sum(
        expert not in home
        for home, rank in zip(in_order(8, 4).experts, place(load, 4).experts, strict=True)
        for expert in rank
    )
    assert moved <= 4


def test_more_nodes_than_groups_are_refused() -> None:
    with pytest.raises(PlanError, match="3 groups"):
        place([1.0] * 9, 4, num_slots=12, num_nodes=2, num_groups=3)
