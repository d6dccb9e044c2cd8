"""Ranks on the cores of a processor: predicted from a probe that is made up here."""

from __future__ import annotations

from typing import Any

import pytest

import plait
from plait.cluster import Cluster
from plait.cluster.cpu_profile import FAMILIES, MEETINGS, OPS, SECONDS, VERSION
from plait.cluster.products import FORWARD, RULE, WEIGHT_GRAD, ProductClass, ProductTable
from plait.errors import ClusterError, WorldSizeError
from plait.parallel.context.ring_schedule import KEYS_PER_STEP
from plait.predict.cost.machines import machine_of
from plait.predict.cost.time.pipeline import StageSeconds, crowded_seconds, pipeline_time
from plait.predict.cost.time.processor import (
    CHUNK_ROWS,
    STEP_ROWS,
    Processor,
    expert_chunks,
    product,
)

FLOPS = ("attention_forward", "attention_backward", "product_flop", "plain_flop")
HOST: dict[str, Any] = {
    "version": VERSION,
    "seconds": dict.fromkeys(SECONDS, 1e-9) | dict.fromkeys(FLOPS, 2e-11),
    "rule": {"met_at_once": KEYS_PER_STEP},
    "products": RULE.as_dict(),
    "engine": {
        **{
            "step": 1e-3,
            "micro_batch": 5e-4,
            "expert": 5e-5,
            "stretch": 1.0,
            "idle": 1.0,
            "memory": 3e8,
        },
        **{name: {"2": 1e-4, "4": 2e-4, "8": 3e-4} for name in MEETINGS},
        "blocks": {family: {"none": 4e-4, "full": 6e-4, "selective": 1e-3} for family in FAMILIES},
    },
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
GPT = {
    "name": "gpt",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 256,
}
CONFIG = {"model": GPT, "data": {"seq_len": 128}, "train": {"global_batch": 16}}


def seconds(plan: str, **changes: Any) -> float:
    return plait.estimate(CONFIG, plan, Cluster.local({**PROBE, **changes})).step_seconds


def seconds_of(model: dict[str, Any], plan: str) -> float:
    return plait.estimate({**CONFIG, "model": model}, plan, Cluster.local(PROBE)).step_seconds


def test_two_ranks_on_two_cores_halve_the_work_and_eight_do_not() -> None:
    two = seconds("dp2")
    eight = seconds("dp8")
    assert 0.5 * seconds("dp1") < two < 0.7 * seconds("dp1")
    assert eight > two  # the same samples, and more to reduce


def test_ranks_that_wait_leave_their_core_to_others() -> None:
    """Four stages on two cores: the bubble of a pipeline is filled by the ranks that share a
    core.
    """
    guess = plait.estimate(CONFIG, "pp4:gpipe mb4", Cluster.local(PROBE))
    assert guess.breakdown.cores > 0
    assert guess.step_seconds < 1.3 * seconds("pp2:gpipe mb4")


def test_a_pipeline_on_fewer_cores_takes_at_least_its_work_and_its_longest_way() -> None:
    stages = [StageSeconds(1.0, 1.0, 1.0)] * 4
    alone = pipeline_time("1f1b", 4, 8, stages)
    times = [crowded_seconds("1f1b", 4, 8, stages, cores) for cores in (1, 2, 3, 4)]
    assert times[0] == pytest.approx(sum(alone.busy))  # one core is never idle
    assert times[1] >= max(sum(alone.busy) / 2, alone.seconds) and times == sorted(
        times, reverse=True
    )
    assert times[3] == pytest.approx(alone.seconds)


def test_recomputation_and_experts_cost_what_the_engine_takes_for_them() -> None:
    moe = {
        **GPT,
        "name": "llama",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
    times = [seconds_of(moe, f"remat:{remat}") for remat in ("none", "full", "selective")]
    assert times[0] < times[2] and times[0] < times[1]
    dear = {**HOST, "engine": HOST["engine"] | {"expert": 5e-3}}
    more = plait.estimate(
        {**CONFIG, "model": moe}, "dp1", Cluster.local({**PROBE, "host": dear})
    ).step_seconds
    chunks = 8 * 2  # each expert has 512 rows, and some more that fit no step
    assert more - times[0] == pytest.approx(4 * (chunks - 2) * (5e-3 - 5e-5))


def test_experts_take_their_rows_in_as_many_chunks_as_the_engine() -> None:
    from plait.models import gated
    from plait.products import Products

    assert (CHUNK_ROWS, STEP_ROWS) == (gated.CHUNK_ROWS, gated.STEP_ROWS)
    for rows in (3, 65, 511, 577, 1500):
        assert expert_chunks(rows) == len(list(gated._chunks((rows,), Products())))


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
        ({"engine": HOST["engine"] | {"blocks": {}}}, "host.engine.blocks.gpt is missing"),
        ({"engine": HOST["engine"] | {"call": {"2": -1.0}}}, "host.engine.call.2 is -1 seconds"),
        ({"links": {"2": {"all_reduce": [1e-5]}}}, "host.links.2.all_reduce"),
        ({"links": 3}, "host.links is missing"),
        ({"rule": {}}, "host.rule.met_at_once"),
        ({"products": {}}, "host.products"),
    ],
)
def test_wrong_measurements_are_all_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=f"run plait probe again(.|\n)*{message}"):
        Cluster.local({**PROBE, "host": {**HOST, **change}})


def test_measurements_of_another_version_are_none() -> None:
    with pytest.raises(ClusterError, match="by another version of plait; run plait probe again"):
        Cluster.local({**PROBE, "host": {**HOST, "version": VERSION - 1}})


def test_large_products_cost_what_the_rule_makes_of_them() -> None:
    """Where the rule does not hold, or a product is small, torch's own seconds count."""
    slow = {**HOST, "seconds": HOST["seconds"] | {"plain_flop": 1e-9}}
    machine = machine_of(Cluster.local({**PROBE, "host": slow}))
    assert isinstance(machine, Processor)
    small = 2 * 128 * 127 * 128
    large = 2 * 128 * 128 * 128
    assert product(machine.profile, FORWARD, (128, 127, 128)) > small * 1e-9
    assert (
        product(machine.profile, FORWARD, (128, 128, 128))
        < 0.1 * large * 1e-9
        < product(machine.profile, FORWARD, (128, 128, 128), by_rule=False)
    )
    assert product(machine.profile, FORWARD, (15, 1024, 1024)) > 1e-9 * 2 * 15 * 1024**2
    plain = {**CONFIG, "train": {"global_batch": 16, "linear_product": "torch"}}
    changed = Cluster.local({**PROBE, "host": slow})
    by_rule, by_torch = (
        plait.estimate(config, "dp1", changed).step_seconds for config in (CONFIG, plain)
    )
    compiled, double = (
        plait.estimate(CONFIG, f"dp1 {how}", changed).step_seconds
        for how in ("compile", "precision:float64")
    )
    assert 5 * by_rule < min(by_torch, compiled, double)


def test_the_measured_table_says_whose_seconds_a_product_costs() -> None:
    """Rows of a weight's gradient are those that it sums over, the last of its sizes."""
    slow = {**HOST, "seconds": HOST["seconds"] | {"plain_flop": 1e-9}}
    table = ProductTable(frozenset({ProductClass(WEIGHT_GRAD, 1024, 1 << 21)}))
    machine = machine_of(Cluster.local({**PROBE, "host": {**slow, "products": table.as_dict()}}))
    assert isinstance(machine, Processor)
    sizes = (32, 64, 1024)
    flops = 2 * 32 * 64 * 1024
    assert product(machine.profile, WEIGHT_GRAD, sizes) < 0.1e-9 * flops
    assert product(machine.profile, FORWARD, sizes) > 1e-9 * flops
    assert product(machine.profile, WEIGHT_GRAD, sizes[::-1]) > 1e-9 * flops
