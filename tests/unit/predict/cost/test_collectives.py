"""Collectives by topology."""

import pytest

from plait.predict.cost.api import machine
from plait.predict.cost.time.collectives import collective_seconds
from plait.predict.cost.time.groups import Group, group

H100 = machine("h100x64")
GIB = 2.0**30


def test_groups_know_how_many_of_their_ranks_share_a_node():
    assert group(8, 1, 8) == Group(8, 8)
    assert group(8, 8, 8) == Group(8, 1)
    assert group(16, 2, 8) == Group(16, 4) and group(16, 2, 8).nodes == 4


def test_a_large_all_reduce_inside_a_node_runs_at_the_link_rate():
    seconds = collective_seconds(H100, "all_reduce", GIB, Group(8, 8))
    ideal = 2 * 7 / 8 * GIB / (H100.link_bandwidth * H100.efficiency.link)
    assert seconds == pytest.approx(ideal, rel=0.05)


def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather():
    both = sum(
        collective_seconds(H100, op, GIB, Group(8, 8)) for op in ("reduce_scatter", "all_gather")
    )
    assert collective_seconds(H100, "all_reduce", GIB, Group(8, 8)) == pytest.approx(both, rel=0.01)


def test_crossing_nodes_is_slower_and_more_ports_are_faster():
    inside = collective_seconds(H100, "all_gather", GIB, Group(8, 8))
    one_port = collective_seconds(H100, "all_gather", GIB, Group(8, 1))
    eight_ports = collective_seconds(H100, "all_gather", GIB, Group(64, 8))
    assert one_port > eight_ports > inside


def test_small_messages_are_latency():
    small = collective_seconds(H100, "all_reduce", 8, Group(64, 8))
    assert small < 1e-3 and small > H100.efficiency.collective_seconds


def test_alone_or_empty_costs_nothing():
    assert collective_seconds(H100, "all_reduce", GIB, Group(1, 1)) == 0
    assert collective_seconds(H100, "all_reduce", 0, Group(8, 8)) == 0
