"""Collectives by topology."""

import pytest

from plait.predict.cost.api import machine
from plait.predict.cost.time.collectives import collective_seconds
from plait.predict.cost.time.groups import Group, group

H100 = machine("h100x64")
A100 = machine("a100-80gbx64")
GIB = 2.0**30


def test_groups_know_how_many_of_their_ranks_share_a_node():
    assert group(8, 1, 8) == Group(8, 8)
    assert group(8, 8, 8) == Group(8, 1)
    assert group(16, 2, 8) == Group(16, 4) and group(16, 2, 8).nodes == 4


def test_a_large_all_reduce_inside_a_node_runs_at_the_link_rate():
    seconds = collective_seconds(A100, "all_reduce", GIB, Group(8, 8))
    ideal = 2 * 7 / 8 * GIB / (A100.link_bandwidth * A100.efficiency.link)
    assert seconds == pytest.approx(ideal, rel=0.05)


def test_a_switch_that_adds_up_makes_an_all_reduce_faster_than_its_ring():
    """430 to 480 GB/s of bus bandwidth are measured on 8 H100, whose links carry 450."""
    seconds = collective_seconds(H100, "all_reduce", GIB, Group(8, 8))
    assert 430e9 < 2 * 7 / 8 * GIB / seconds < 490e9


def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather():
    both = sum(
        collective_seconds(A100, op, GIB, Group(8, 8)) for op in ("reduce_scatter", "all_gather")
    )
    assert collective_seconds(A100, "all_reduce", GIB, Group(8, 8)) == pytest.approx(both, rel=0.01)


def test_crossing_nodes_is_slower_and_more_ports_are_faster():
    inside = collective_seconds(H100, "all_gather", GIB, Group(8, 8))
    one_port = collective_seconds(H100, "all_gather", GIB, Group(8, 1))
    eight_ports = collective_seconds(H100, "all_gather", GIB, Group(64, 8))
    assert one_port > eight_ports > inside


def test_two_nodes_whose_switches_add_up_send_each_sum_once():
    """Two nodes of 8 H100 take 4.5 to 4.6 ms for 1 GiB in public logs; a ring would take 6.6."""
    assert 4.4e-3 < collective_seconds(H100, "all_reduce", GIB, Group(16, 8)) < 5.0e-3
    more = collective_seconds(H100, "all_reduce", GIB, Group(32, 8))
    assert more > 1.3 * collective_seconds(H100, "all_reduce", GIB, Group(16, 8))


def test_each_crossing_between_nodes_passes_through_the_hosts():
    small = 1 << 16
    two, four = (
        collective_seconds(H100, "all_gather", small, Group(8 * nodes, 8)) for nodes in (2, 4)
    )
    assert four - two > 2 * 18e-6
    assert two - collective_seconds(H100, "all_gather", small, Group(8, 8)) > 18e-6


def test_small_messages_are_latency():
    small = collective_seconds(H100, "all_reduce", 8, Group(64, 8))
    assert small < 1e-3 and small > H100.efficiency.collective_seconds


def test_alone_or_empty_costs_nothing():
    assert collective_seconds(H100, "all_reduce", GIB, Group(1, 1)) == 0
    assert collective_seconds(H100, "all_reduce", 0, Group(8, 8)) == 0


def test_a_gather_over_many_ranks_pays_for_every_step_of_its_ring():
    """NCCL has no shorter way than a ring for gathers and scatters; an all-reduce has trees."""
    small = 1 << 20
    few = collective_seconds(H100, "all_gather", small, Group(64, 8))
    many = collective_seconds(H100, "all_gather", small, Group(1024, 8))
    assert many > 10 * few
    assert collective_seconds(H100, "all_reduce", small, Group(1024, 8)) < many / 3


def test_two_devices_alone_do_not_have_the_rate_of_all():
    pair = collective_seconds(H100, "all_gather", GIB, Group(2, 2))
    alike = collective_seconds(H100, "all_gather", GIB, Group(8, 8)) * (1 / 2) / (7 / 8)
    assert pair > 1.2 * alike
    l40s = machine("l40s")
    few, all_of_them = (collective_seconds(l40s, "all_gather", GIB, Group(n, n)) for n in (2, 8))
    assert all_of_them > 10 * few


def test_congestion_is_a_property_of_the_cluster(tmp_path):
    files = {}
    for name, congestion in (("fat", 0.0), ("thin", 1.0)):
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f'count = 64\n[device]\npreset = "h100"\n[network]\ncongestion = {congestion}'
        )
        files[name] = machine(str(path))
    seconds = {
        name: collective_seconds(one, "all_gather", GIB, Group(64, 8))
        for name, one in files.items()
    }
    assert seconds["thin"] > 2 * seconds["fat"]


def test_steps_of_a_ring_over_nodes_follow_each_other_at_the_pace_of_the_network(tmp_path):
    path = tmp_path / "slow.toml"
    path.write_text('count = 64\n[device]\npreset = "h100"\n[network]\nstep_us = 40\n')
    slow = machine(str(path))

    def times(payload: float, ranks: Group) -> tuple[float, float]:
        return (
            collective_seconds(H100, "all_gather", payload, ranks),
            collective_seconds(slow, "all_gather", payload, ranks),
        )

    quick, paced = times(1 << 20, Group(64, 8))
    assert quick < 63 * 40e-6 < paced < 63 * 40e-6 + 10e-6
    quick, paced = times(4 * GIB, Group(64, 8))
    assert quick == paced  # the bytes of each step take longer than 40 microseconds
    quick, paced = times(1 << 20, Group(8, 8))
    assert quick == paced
