"""The estimate of a model with adapters: they alone have gradients and moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait import models
from plait.errors import ModelError
from plait.models.adapter_parts import AdapterSettings
from plait.models.adapters import adapt
from plait.predict.cost import estimate

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
    whole = estimate(CONFIG, plan="dp1", cluster="a100-80gbx1")
    guess = estimate({**CONFIG, "adapter": ADAPTER}, plan="dp1", cluster="a100-80gbx1")
    memory = guess.as_dict()["memory"]
    assert memory["parameters"] == pytest.approx(4 * (base + trained), rel=1e-6)
    assert memory["gradients"] == pytest.approx(4 * trained, rel=1e-6)
    assert memory["optimizer"] == pytest.approx(8 * trained, rel=1e-6)
    assert guess.step_seconds < whole.step_seconds


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
        from plait.predict.cost.model.adapters import adapter_share

        adapter_share(config)
