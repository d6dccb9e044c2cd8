"""Activations in host memory, as they are predicted: two blocks on the device, and the copies."""

import pytest

import plait
from plait.cluster import Cluster
from plait.errors import NotAvailable, PlanError
from plait.plan import Plan
from plait.predict.cost.api import job_of
from plait.predict.cost.layout import lay_out
from plait.predict.cost.memory import host_activations
from plait.predict.cost.memory.offload import HOST_LINK
from plait.predict.cost.memory.rank_memory import rank_activations
from tests.unit.predict.cost.test_processor import PROBE

GPT = {
    "model": {
        "name": "gpt",
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "intermediate_size": 8192,
        "vocab_size": 50304,
    },
    "data": {"name": "random", "seq_len": 2048},
    "train": {"global_batch": 64},
}
OFFLOADED = {**GPT, "plan": {"offload_activations": True}}


def parts(plan):
    """Bytes kept by a plan's first rank as it is, on the device and on the host."""
    plan = Plan.parse(plan)
    job = job_of(OFFLOADED, plan)
    layout = lay_out(job, plan)
    asked = (layout.live_stages(0), layout.shard, job.numerics(plan))
    return rank_activations(*asked)[0], host_activations.on_device(*asked)[0], asked


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("plan", ["dp8:zero3", "pp4:1f1b dp2:zero1 mb8"])
def test_two_blocks_are_on_the_device_and_all_on_the_host(plan, remat):
    whole, device, asked = parts(f"{plan} precision:bf16 remat:{remat}")
    host = host_activations.on_host(*asked)
    [(stage, live)] = asked[0]
    layers = sum(count for block, count in stage.runs if block.name not in {"embedding", "head"})
    assert device == pytest.approx(whole - host + 2 * host / (live * layers))


def test_a_pass_takes_as_long_as_its_copies_at_least():
    """Of `remat:none` PCIe is the longer part on an H100; of `remat:full` it is hidden."""
    slow = plait.estimate(OFFLOADED, "dp8:zero3 precision:bf16", "h100x8")
    plain = plait.estimate(GPT, "dp8:zero3 precision:bf16", "h100x8")
    [(stage, live)] = parts("dp8:zero3 precision:bf16")[2][0]
    *_, asked = parts("dp8:zero3 precision:bf16")
    copies = 2 * host_activations.of_pass(stage, *asked[1:]) / HOST_LINK
    assert live == 1
    assert slow.step_seconds > max(plain.step_seconds, copies)
    assert slow.memory.total < plain.memory.total
    hidden = plait.estimate(OFFLOADED, "dp8:zero3 precision:bf16 remat:full", "h100x8")
    kept = plait.estimate(GPT, "dp8:zero3 precision:bf16 remat:full", "h100x8")
    assert hidden.step_seconds == pytest.approx(kept.step_seconds)
    assert hidden.memory.activations < kept.memory.activations


def test_a_processor_gains_nothing():
    offloaded, kept = (
        plait.estimate(config, "dp2", Cluster.local(PROBE)) for config in (OFFLOADED, GPT)
    )
    assert offloaded.memory == kept.memory
    assert offloaded.step_seconds == kept.step_seconds


def test_recomputation_that_keeps_products_is_refused():
    for word in ("selective", "auto"):
        with pytest.raises((PlanError, NotAvailable), match="keeps products by itself"):
            plait.estimate(OFFLOADED, f"dp8:zero3 remat:{word}", "h100x8")


def test_a_search_takes_what_can_move():
    plans = plait.choose(OFFLOADED, cluster="a100-40gbx8")
    assert plans
    assert {one.plan.remat for one in plans} <= {"none", "full"}
