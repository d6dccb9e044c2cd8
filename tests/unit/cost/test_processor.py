"""Ranks on the cores of a processor: predicted from a probe that is made up here."""

from __future__ import annotations

from typing import Any

import pytest

import plait
from plait.cluster import Cluster
from plait.cluster.host import OPS, SECONDS
from plait.errors import ClusterError, WorldSizeError

HOST: dict[str, Any] = {
    "seconds": dict.fromkeys(SECONDS, 1e-9) | {"attention_forward": 2e-11, "attention_backward": 1e-10},
    "engine": {"step": 1e-3, "micro_batch": 5e-4, "block": 4e-4, "memory": 3e8},
    "links": {str(n): {op: [2e-5 * n, 4e9] for op in OPS} for n in (2, 4, 8)},
}
PROBE: dict[str, Any] = {
    "num_devices": 2,
    "peak_flops": {"float32": 1e11, "float64": 5e10},
    "memory_bytes": 8e9,
    "memory_bandwidth": 1e10,
    "link_bandwidth": 4e9,
    "link_latency_seconds": 2e-5,
    "host": HOST,
}
GPT = {"name": "gpt", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8, "vocab_size": 256}
CONFIG = {"model": GPT, "data": {"seq_len": 128}, "train": {"global_batch": 16}}


def seconds(plan: str, **changes: Any) -> float:
    return plait.estimate(CONFIG, plan, Cluster.local({**PROBE, **changes})).step_seconds


def test_two_ranks_on_two_cores_halve_the_work_and_eight_do_not() -> None:
    two, eight = seconds("dp2"), seconds("dp8")
    assert 0.5 * seconds("dp1") < two < 0.7 * seconds("dp1")
    assert eight > two  # the same samples, and more to reduce


def test_ranks_that_wait_leave_their_core_to_others() -> None:
    """Four stages on two cores: the bubble of a pipeline is filled by the ranks that share a core."""
    guess = plait.estimate(CONFIG, "pp4:gpipe mb4", Cluster.local(PROBE))
    assert guess.breakdown.cores > 0
    assert guess.step_seconds < 1.3 * seconds("pp2:gpipe mb4")


def test_the_parts_of_a_step_add_up() -> None:
    for plan in ("dp8:zero3", "tp4:2d dp2", "pp4 dp2 mb4", "dp1"):
        guess = plait.estimate(CONFIG, plan, Cluster.local(PROBE))
        assert sum(guess.breakdown.as_dict().values()) == pytest.approx(guess.step_seconds)


def test_ranks_share_the_memory_and_each_begins_with_a_process() -> None:
    few, many = (plait.estimate(CONFIG, plan, Cluster.local(PROBE)) for plan in ("dp2", "dp8"))
    assert few.memory_limit == 4 * many.memory_limit == 8e9
    assert few.memory.buffers >= HOST["engine"]["memory"]


def test_the_probe_may_hold_no_more_than_a_cluster_and_then_ranks_do_not_share() -> None:
    cluster = Cluster.local({key: value for key, value in PROBE.items() if key != "host"})
    assert plait.estimate(CONFIG, "dp2", cluster).step_seconds > 0
    with pytest.raises(WorldSizeError):
        plait.estimate(CONFIG, "dp8", cluster)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": {}}, "host.seconds.add_forward"),
        ({"seconds": HOST["seconds"] | {"update": -1.0}}, "host.seconds.update is -1 seconds"),
        ({"engine": HOST["engine"] | {"memory": "much"}}, "host.engine.memory must be a number"),
        ({"links": {"2": {"all_reduce": [1e-5]}}}, "host.links.2.all_reduce"),
        ({"links": 3}, "host.links is missing"),
    ],
)
def test_wrong_measurements_are_all_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=f"run plait probe again(.|\n)*{message}"):
        Cluster.local({**PROBE, "host": {**HOST, **change}})
