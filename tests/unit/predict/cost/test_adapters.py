"""The estimate of a model with adapters: they alone have gradients and moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait import choose, models
from plait.cluster import Cluster
from plait.errors import ModelError
from plait.models.adapter_parts import AdapterSettings
from plait.models.adapters import adapt
from plait.plan import Plan
from plait.predict.cost import estimate
from plait.predict.cost.api import described, job_of
from plait.predict.cost.machines import machine_of
from plait.predict.cost.model.adapters import adapters_of
from plait.predict.planner.search import SearchSettings, time_floor
from plait.predict.planner.space import Degrees
from tests.unit.predict.cost.shapes import LLAMA_8B
from tests.unit.predict.cost.shapes import config as config_of

MODEL: dict[str, Any] = {
    "name": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}
CONFIG = {"model": MODEL, "data": {"name": "random", "seq_len": 32}}
ADAPTER = {"kind": "lora", "rank": 4, "targets": ["q", "v"]}


def numbers() -> tuple[int, int]:
    """Parameters of the base, and of the adapters."""
    with torch.device("meta"):
        model = models.make(**MODEL)
    base = sum(param.numel() for param in model.parameters())
    adapt(model, AdapterSettings(rank=4, targets=("q", "v")))
    return base, sum(param.numel() for param in model.parameters()) - base


def test_adapters_alone_have_gradients_and_moments() -> None:
    base, trained = numbers()
    guess = estimate({**CONFIG, "adapter": ADAPTER}, plan="dp1", cluster="a100-80gbx1")
    memory = guess.as_dict()["memory"]
    assert memory["parameters"] == pytest.approx(4 * (base + trained), rel=1e-6)
    assert memory["gradients"] == pytest.approx(4 * trained, rel=1e-6)
    assert memory["optimizer"] == pytest.approx(8 * trained, rel=1e-6)


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    wide = {**CONFIG, "model": {**MODEL, "hidden_size": 4096, "intermediate_size": 14336}}
    wide["data"] = {"name": "random", "seq_len": 4096}
    whole, guess = (
        estimate({**wide, **adapter}, plan="dp1", cluster="a100-80gbx1").step_seconds
        for adapter in ({}, {"adapter": ADAPTER})
    )
    assert 0.6 * whole < guess < 0.75 * whole


@pytest.mark.parametrize(("card", "tokens_per_second"), [("h100", 13_805), ("h200", 14_401)])
def test_the_time_of_adapters_is_near_what_was_measured(card: str, tokens_per_second: int) -> None:
    """Llama 8B, rank 16 on every linear layer, 4,096 tokens (docs/gpu.md); nothing is fitted."""
    job = {**config_of(LLAMA_8B, 4096, 1), "adapter": {"kind": "lora", "rank": 16}}
    guess = estimate(job, plan="dp1 precision:bf16 compile", cluster=f"{card}x1")
    assert guess.step_seconds == pytest.approx(4096 / tokens_per_second, rel=0.05)


def wide_seconds(plan: str = "dp1", **keys: Any) -> float:
    """Seconds of a step of two wide layers with adapters on all their linear layers."""
    model = {**MODEL, "hidden_size": 2048, "intermediate_size": 8192}
    adapter = {"kind": "lora", "rank": 16, **keys}
    job = {"model": model, "data": {"seq_len": 2048}, "adapter": adapter}
    cluster = f"a100-80gbx{Plan.parse(plan).world_size}"
    return estimate(job, plan=f"{plan} precision:bf16", cluster=cluster).step_seconds


def test_codes_and_norms_take_time() -> None:
    assert wide_seconds(base="nf4") > wide_seconds()
    assert wide_seconds(kind="dora") > wide_seconds()
    assert wide_seconds("dp1 remat:full", kind="dora") > wide_seconds("dp1 remat:full")


def test_a_tensor_axis_divides_the_matrix_that_touches_its_cut() -> None:
    """Of a column-cut layer that is B, with the sum; of a row-cut layer A, and the sum is whole."""
    assert wide_seconds("tp4", targets=["q"]) < wide_seconds("tp4", targets=["o"])
    assert wide_seconds("tp4") < wide_seconds() / 2


def test_no_plan_with_adapters_is_below_the_floor_of_its_degrees() -> None:
    """The search leaves out degrees whose floor is above the best plan that it knows."""
    wide = {**MODEL, "hidden_size": 2048, "intermediate_size": 8192}
    config = {"model": wide, "data": {"seq_len": 2048}, "adapter": ADAPTER}
    config["train"] = {"global_batch": 64}
    job = job_of(config, None, num_devices=8)
    machine = machine_of(Cluster.parse("h100x8"))
    for found in choose(config, cluster="h100x8", top=20):
        plan = found.plan
        asked = Degrees(plan.tp, plan.pp.size, plan.cp, plan.ep, plan.dp.size)
        settings = SearchSettings(precision=plan.precision)
        assert found.step_seconds >= time_floor(job, machine, asked, settings, plan.micro_batches)


def test_zero3_gathers_the_frozen_weights_and_reduces_adapters() -> None:
    whole = estimate(CONFIG, plan="dp2:zero3", cluster="a100-80gbx2")
    guess = estimate({**CONFIG, "adapter": ADAPTER}, plan="dp2:zero3", cluster="a100-80gbx2")
    share = guess.as_dict()["traffic"]["dp"] / whole.as_dict()["traffic"]["dp"]
    assert 2 / 3 < share < 0.75


@pytest.mark.parametrize(("base", "width"), [("int8", 1.0625), ("nf4", 0.5625)])
def test_a_base_in_codes_takes_their_bytes(base: str, width: float) -> None:
    """Linear layers of blocks but the output are in codes; embedding, norms and output are not."""
    codes = {**CONFIG, "adapter": {**ADAPTER, "base": base}}
    plain = {**CONFIG, "adapter": ADAPTER}
    whole, guess = (estimate(one, plan="dp1", cluster="a100-80gbx1") for one in (plain, codes))
    coded = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    spared = whole.as_dict()["memory"]["parameters"] - guess.as_dict()["memory"]["parameters"]
    assert spared == pytest.approx((4 - width) * coded, rel=1e-6)
    sent, less = (
        estimate(one, plan="dp2:zero3", cluster="a100-80gbx2").as_dict()["traffic"]["dp"]
        for one in (plain, codes)
    )
    assert sent - less == pytest.approx((4 - width) * coded, rel=1e-2)


def test_adapters_of_experts_are_summed_where_their_experts_are() -> None:
    """Under ep2 of two ranks the matrices of experts are nobody else's, and those of q and v are
    summed.
    """
    mixture = {**MODEL, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = {**CONFIG, "model": mixture, "adapter": {**ADAPTER, "targets": ["q", "v", "experts"]}}
    attention = 2 * 2 * 4 * (64 + 64)
    experts = 2 * 3 * 4 * 4 * (64 + 128)
    whole, apart = (
        estimate(config, plan=plan, cluster="a100-80gbx2").as_dict() for plan in ("dp2", "dp2 ep2")
    )
    assert whole["traffic"]["dp"] == pytest.approx(4 * (attention + experts), rel=1e-6)
    assert apart["traffic"]["dp"] == pytest.approx(4 * attention, rel=1e-6)
    assert apart["memory"]["gradients"] == pytest.approx(4 * (attention + experts / 2), rel=1e-6)


def test_a_model_without_a_name_is_refused() -> None:
    config = {"model": {"model_type": "llama"}, "adapter": ADAPTER}
    with pytest.raises(ModelError, match="the size of adapters is counted on the model itself"):
        adapters_of(config, described(CONFIG))


def test_a_base_in_codes_of_the_size_of_one_device_finds_a_plan() -> None:
    """70 B parameters in four bits are 40 GB: their bytes count, and not those of bf16."""
    larger = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
    model = {**LLAMA_8B, **larger, "intermediate_size": 28672}
    adapter = {"kind": "lora", "rank": 16, "base": "nf4"}
    job = {**config_of(model, 2048, 1), "adapter": adapter}
    assert choose(job, cluster="h100x1", top=1)[0].fits
