"""Each part of the model against measurements of that part alone."""

import statistics

import pytest
from benchmarks.planner.parts import medians, reserved_beyond

import plait
from plait.cluster import Cluster
from plait.predict.cost.machines import machine_of
from plait.predict.cost.memory.rules import DEVICE
from plait.predict.cost.runtime import Runtime
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.kernels import Setting, gemm_seconds
from tests.unit.predict.cost.shapes import LLAMA_8B, config

LARGEST = {
    "collectives, large": 0.15,
    "collectives, small": 0.15,
    "between nodes, large": 0.15,
    "between nodes, small": 0.16,
    "4 to 64 nodes, all_gather": 0.08,
    "4 to 64 nodes, all_reduce": 0.15,
    "4 to 64 nodes, all_to_all": 0.15,
    "4 to 64 nodes, reduce_scatter": 0.10,
    "products, large": 0.06,
    "products, small": 0.06,
    "attention, long": 0.06,
    "attention, short": 0.10,
}


@pytest.fixture(scope="module")
def found():
    return medians()


@pytest.mark.parametrize("part", LARGEST)
def test_a_part_is_right_by_itself(found, part):
    count, _, size = found[part]
    assert count >= (5 if "4 to 64" in part else 32 if "nodes" in part else 100)
    assert size <= LARGEST[part]


def test_what_an_allocator_reserves_is_the_middle_of_what_logs_say():
    beyond = reserved_beyond()
    assert len(beyond) == 22
    assert statistics.median(beyond) == pytest.approx(DEVICE.fragmentation, abs=0.005)


def test_a_short_product_by_itself_is_faster_than_in_a_step_where_clocks_fall():
    warm = {}
    for name in ("h100", "a100-80gb"):
        machine = machine_of(Cluster.parse(name))
        alone, inside = (
            gemm_seconds(Setting(machine, Sharding(), in_step=hot), 4096, 4096, 4096)
            for hot in (False, True)
        )
        warm[name] = inside / alone
    assert warm["h100"] > 1.2 and 1.0 < warm["a100-80gb"] < 1.06


def test_torchtitan_repeats_half_of_the_products_and_keeps_less():
    asked = config(LLAMA_8B, seq_len=4096, global_batch=8)
    plan = "dp8:zero3 remat:selective precision:bf16"
    half, none = (
        plait.estimate(asked, plan, "h100x8", framework=name) for name in ("torchtitan", "fsdp")
    )
    repeated = half.breakdown.recompute / half.breakdown.compute
    assert 0.12 < repeated < 0.25 and half.breakdown.recompute > none.breakdown.recompute
    assert half.memory.activations < none.memory.activations


def test_the_first_flash_attention_of_llm_foundry_is_slower():
    asked = config(LLAMA_8B, seq_len=16384, global_batch=8)
    plan = "dp8:zero3 remat:full precision:bf16"
    first, second = (
        plait.estimate(asked, plan, "a100-80gbx8", framework=name).breakdown.compute
        for name in ("llm-foundry", "fsdp")
    )
    assert first > 1.1 * second


def test_plaits_own_attention_is_what_torch_takes_by_itself():
    asked = config(LLAMA_8B, seq_len=16384, global_batch=8)

    def seconds(cluster, plan, **keys):
        tables = {**asked, "model": {**asked["model"], **keys}}
        return plait.estimate(tables, plan, cluster).breakdown.compute

    plan = "dp8:zero3 remat:full precision:bf16"
    for cluster, named in (("h100x8", "cudnn"), ("a100-80gbx8", "flash_attention_2")):
        other = "flash_attention_2" if named == "cudnn" else "cudnn"
        assert seconds(cluster, plan) == seconds(cluster, plan, attn_implementation=named)
        assert seconds(cluster, plan) == seconds(cluster, plan, attn_implementation="sdpa")
        assert seconds(cluster, plan) < seconds(cluster, plan, attn_implementation=other)
    ring = "cp8:ring remat:full precision:bf16"
    portable = seconds("h100x8", ring, attn_implementation="flash_attention_2")
    assert seconds("h100x8", ring) == portable


@pytest.mark.parametrize(
    ("plan", "moved"),
    [("dp8", 6), ("dp8:zero3", 6), ("dp8 mb4", 4 * 2), ("dp4:zero1 tp2", 3), ("dp8:zero2 mb4", 24)],
)
def test_gradients_are_copied_to_where_they_are_added_up(plan, moved):
    """Bytes a parameter, beside those of adding up."""
    asked = config(LLAMA_8B, seq_len=4096, global_batch=32)
    there, copied = (
        plait.estimate(
            asked, f"{plan} precision:bf16", "h100x8", runtime=Runtime(copies_gradients=flag)
        ).breakdown.compute
        for flag in (False, True)
    )
    rate = machine_of(Cluster.parse("h100")).streaming_rate
    assert copied - there == pytest.approx(moved * 8.03e9 / rate, rel=1e-2)
