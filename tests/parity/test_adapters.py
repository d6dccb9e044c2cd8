"""Adapters against PEFT on one device: equal values, two steps in float64, every axis."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait import models
from plait.models import adapter_files
from plait.models.adapter_parts import AdapterSettings
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.beside_peft import check_equal, steps_alone, train, with_values
from tests.parity.families import HUGGING_FACE
from tests.parity.harness import TOLERANCE, join

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

OWN = {
    "name": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "own": OWN,
    "wide": {**OWN, "hidden_size": 128, "intermediate_size": 192},
    "moe": {**OWN, "num_local_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1},
    "llama": {"name": "hf", "config": HUGGING_FACE["hf-llama"]},
    "gpt2": {"name": "hf", "config": HUGGING_FACE["hf-gpt2"]},
    "qwen2": {"name": "hf", "config": HUGGING_FACE["hf-qwen2"]},
    "phi3": {"name": "hf", "config": {**HUGGING_FACE["hf-qwen2"], "model_type": "phi3"}},
}
TARGETS = {
    "own": ("q", "v", "o", "gate", "down"),
    "wide": ("q", "v", "o", "gate", "down"),
    "moe": ("q", "o", "shared.up", "shared.down"),
    "llama": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "qwen2": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    "phi3": ("o_proj", "gate_up_proj", "down_proj"),
}
ALL = ["dp2", "dp2:zero1", "dp2:zero2", "dp2:zero3", "tp2", "tp2:1d,sp", "tp4:2d", "tp8:3d"]
PRODUCTS = ["tp2 dp2:zero3", "pp2:1f1b tp2:1d,sp mb2", "pp2:zb-h1 dp2:zero1 mb2 remat:full"]
AXES = ["dp2", "dp2:zero3", "tp2", "pp2:1f1b mb2", "cp2:ring", "cp2:ulysses tp2 dp2:zero3"]
CASES = [
    *[("own", "lora", plan) for plan in [*ALL, "tp8:2.5d,depth2", "pp2:1f1b mb2", "cp2:ring"]],
    *[("own", "lora", plan) for plan in [*PRODUCTS, "cp2:ulysses tp2 dp2:zero3"]],
    *[("own", "dora", plan) for plan in ["dp2:zero3", "tp2", "tp4:2d", "tp8:3d", "cp2:ring"]],
    *[("moe", "lora", plan) for plan in ["dp2 ep2", "dp2:zero3 ep2", "tp2 dp2:zero1 ep2"]],
    *[("llama", "lora", plan) for plan in ["dp2:zero3", "tp2:1d,sp", "tp4:2d", "pp2 mb2"]],
    *[("llama", "dora", plan) for plan in ["tp2:1d,sp", *PRODUCTS[:1]]],
    *[("qwen2", "lora", plan) for plan in [*AXES, "pp2:1f1b tp2 dp2:zero1 mb2"]],
    *[("phi3", "lora", plan) for plan in ("tp4:2d", "tp8:3d")],
    ("phi3", "dora", "tp8:2.5d,depth2"),
    *[("gpt2", kind, plan) for kind in ("lora", "dora") for plan in ("tp2", "tp4:2d", "tp8:3d")],
]


def base_of(family: str) -> Any:
    """The start of a family without adapters, on one device."""
    return with_values(FAMILIES[family])


class Reference:
    """Two steps of PEFT, and the folder of its adapter before them."""

    def __init__(
        self,
        family: str,
        kind: str,
        folder: Path,
        change: Callable[[nn.Module], None] | None = None,
    ) -> None:
        model = base_of(family)
        if change is not None:
            change(model)
        inner = model.model if adapter_files.is_wrapped(model) else model
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=list(TARGETS[family]),
            use_dora=kind == "dora",
            init_lora_weights=False,
            fan_in_fan_out=family == "gpt2",
        )
        torch.manual_seed(11)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, at what PEFT asks it
            wrapped: Any = peft.get_peft_model(inner, config).double().train()
        for name, param in wrapped.named_parameters():
            if "lora_B" in name:
                param.data.normal_(std=0.3)
        wrapped.save_pretrained(folder)
        self.folder = folder
        self.losses = steps_alone(wrapped)
        self.state = {
            name: value.detach().clone()
            for name, value in peft.get_peft_model_state_dict(wrapped).items()
        }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str, kind: str) -> Reference:
        return Reference(family, kind, tmp_path_factory.mktemp(f"{family}-{kind}"))

    return make


def settings(family: str, kind: str, folder: Path) -> AdapterSettings:
    return AdapterSettings(kind, 4, 8.0, TARGETS[family], weights=folder)


def make_model(family: str, kind: str, folder: Path) -> nn.Module:
    """With values for a model of this project; else on the meta device, values in files."""
    model = base_of(family)
    if adapter_files.is_wrapped(model):
        base = folder / "base"
        model.model.save_pretrained(base)
        model = models.make("hf", config=base, weights=base)
    return adapter_files.with_adapters(model, settings(family, kind, folder))


@pytest.mark.parametrize(("family", "kind", "plan"), CASES)
def test_training_is_that_of_peft_on_one_device(
    family: str, kind: str, plan: str, reference: Any, ranks: Any
) -> None:
    """Stages tell each other the state of random numbers, which threads share."""
    truth = reference(family, kind)
    model = make_model(family, kind, truth.folder)
    parsed = Plan.parse(plan)
    run = threaded if parsed.pp.size == 1 else ranks
    check_equal(lambda: run(parsed.world_size, train, plan, model, plan=plan), model, truth)


WRAPPED = ["dp2", "dp2:zero3", "tp2", "tp4:2d", "pp2:1f1b mb2", "pp2:1f1b tp2 dp2:zero1 mb2"]


@pytest.mark.parametrize("plan", WRAPPED)
def test_a_model_that_peft_has_wrapped_trains_as_it_is(plan: str, reference: Any) -> None:
    truth = reference("own", "lora")
    base = base_of("own")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.PeftModel.from_pretrained(base, truth.folder, is_trainable=True).double()
    _equals_reference(plan, model, truth)


def _equals_reference(plan: str, model: nn.Module, truth: Any) -> None:
    world_size = Plan.parse(plan).world_size
    results = threaded(world_size, train, plan, model, plan=plan)
    for losses_of_rank, *_ in results:
        torch.testing.assert_close(losses_of_rank, truth.losses, rtol=TOLERANCE, atol=0)
    found = join([parts for _, parts, _ in results])
    for name, expected in truth.state.items():
        part, _, _ = name.rpartition(".")
        value = found[f"{part}.default.weight"].view_as(expected)
        torch.testing.assert_close(value, expected, rtol=TOLERANCE, atol=1e-12)


class WrappedExperts:
    """Two steps of PEFT on attention and on the experts of a library's Mixtral."""

    def __init__(self) -> None:
        config = transformers.MixtralConfig(
            **HUGGING_FACE["hf-llama"], num_local_experts=4, num_experts_per_tok=2
        )
        config._experts_implementation = "eager"  # the grouped product has no float64
        lora = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,
        )
        torch.manual_seed(1)
        base = transformers.AutoModelForCausalLM.from_config(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model: Any = peft.get_peft_model(base, lora).double().train()
        alone = copy.deepcopy(self.model)
        self.losses = steps_alone(alone)
        trained = [(name, p) for name, p in alone.named_parameters() if p.requires_grad]
        self.state = {
            name.replace(".default.weight", ".weight"): param.detach() for name, param in trained
        }


@pytest.mark.parametrize("plan", ["dp2 ep2", "dp4:zero3 ep2", "dp2 ep2 tp2", "tp2"])
def test_adapters_around_experts_lie_with_them(plan: str) -> None:
    truth = WrappedExperts()
    assert sum("experts" in name for name in truth.state) == 8
    _equals_reference(plan, truth.model, truth)
