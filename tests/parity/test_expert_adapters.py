"""Adapters of packed experts against PEFT's `target_parameters` on one device, two steps in
float64.
"""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait import models
from plait.comm import World
from plait.engine.build import Options, build
from plait.models import adapter_files
from plait.models.adapter_parts import AdapterSettings
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.beside_peft import (
    SEED,
    batch,
    check_equal,
    logits_loss,
    steps_alone,
    train,
    with_values,
)
from tests.parity.families import HUGGING_FACE
from tests.parity.harness import optimizer

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
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
}
SMALL = {**HUGGING_FACE["hf-qwen2"], "num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**SMALL, "model_type": "mixtral"},
    "gpt_oss": {**SMALL, "model_type": "gpt_oss", "head_dim": 8},
    "jetmoe": {**SMALL, "model_type": "jetmoe", "kv_channels": 8, "num_key_value_heads": 2},
}
"""Experts that plait computes, experts whose weights are [E, in, out], and one product a module."""
TARGETS = {
    "own": ("q", "o", "experts"),
    "mixtral": ("q_proj", "experts.gate_up_proj", "experts.down_proj"),
    "gpt_oss": ("q_proj", "experts.gate_up_proj", "experts.down_proj"),
    "jetmoe": ("kv_proj", "input_linear", "output_linear"),
}
LAYERS = {"own": ["q", "o"], "jetmoe": ["kv_proj"]}
PARAMETERS = {
    "own": ["experts.gate", "experts.up", "experts.down"],
    "jetmoe": ["input_linear.weight", "output_linear.weight"],
}
PACKED = ["experts.gate_up_proj", "experts.down_proj"]


def library_base(family: str) -> Any:
    config = transformers.AutoConfig.for_model(**CONFIGS[family])
    config._experts_implementation = "eager"  # the grouped product has no float64
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).double()


class Reference:
    """Two steps of PEFT, and the folder of its adapter before them."""

    def __init__(self, family: str, folder: Path) -> None:
        self.base = None if family == "own" else folder / "base"
        self.folder = folder / "adapter"
        model = with_values(OWN) if self.base is None else library_base(family)
        if self.base is not None:
            model.save_pretrained(self.base)
            keys = {"name": "hf", "config": self.base, "weights": self.base}
            model = with_values(keys).model  # whose routers and angles are in float64
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=LAYERS.get(family, ["q_proj"]),
            target_parameters=PARAMETERS.get(family, PACKED),
            init_lora_weights=False,
        )
        torch.manual_seed(11)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers, at what PEFT asks it
            wrapped: Any = peft.get_peft_model(model, config).double().train()
            wrapped.save_pretrained(self.folder)
        self.losses = steps_alone(wrapped)
        self.state = {
            name: value.detach().clone()
            for name, value in peft.get_peft_model_state_dict(wrapped).items()
        }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Reference:
        return Reference(family, tmp_path_factory.mktemp(family))

    return make


def make_model(family: str, truth: Reference) -> nn.Module:
    """With values for a model of this project; else on the meta device, values in files."""
    base = truth.base
    model = with_values(OWN) if base is None else models.make("hf", config=base, weights=base)
    settings = AdapterSettings("lora", 4, 8.0, TARGETS[family], weights=truth.folder)
    return adapter_files.with_adapters(model, settings)


CASES = [
    *[("own", plan) for plan in ("dp2:zero3", "dp2 ep2 tp2:1d,sp", "pp2:zb-h1 dp2:zero1 mb2")],
    *[("own", plan) for plan in ("cp2:ring", "dp4:zero3 ep2")],
    *[("mixtral", plan) for plan in ("tp2", "dp2 ep2 tp2", "dp2:zero3 ep2 remat:full")],
    *[("gpt_oss", plan) for plan in ("dp2:zero3", "dp2 ep2 tp2", "pp2:1f1b mb2")],
    *[("jetmoe", plan) for plan in ("dp2 ep2", "tp2")],
]
MORE = [
    *[("own", plan) for plan in ("dp2", "tp2", "dp2 ep2", "dp2 ep2 tp2", "pp2:1f1b mb2")],
    ("own", "dp2:zero3 remat:full"),
    *[("mixtral", plan) for plan in ("dp2:zero3", "dp2 ep2", "pp2:1f1b mb2", "cp2:ring")],
    *[("gpt_oss", plan) for plan in ("dp2 ep2", "tp2", "dp2:zero3 ep2 remat:full", "cp2:ring")],
    ("jetmoe", "dp2:zero3"),
]


@pytest.mark.parametrize(
    ("family", "plan"), [*CASES, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE)]
)
def test_training_is_that_of_peft_on_one_device(family: str, plan: str, reference: Any) -> None:
    truth = reference(family)
    model = make_model(family, truth)
    ranks = Plan.parse(plan).world_size
    check_equal(lambda: threaded(ranks, train, plan, model, plan=plan), model, truth)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_peft_loads_the_exported_adapter_and_the_merged_model_is_equal(
    family: str, reference: Any, tmp_path: Path
) -> None:
    """The adapter's files under PEFT, and the merged model alone, give the logits of the run."""
    truth = reference(family)
    model = make_model(family, truth)

    def run(world: World) -> None:
        engine = build(
            copy.deepcopy(model),
            "dp2:zero3 ep2 precision:float64",
            loss=logits_loss,
            optimizer=optimizer,
            options=Options(seed=SEED),
            world=world,
        )
        engine.step(tuple(part.tensor_split(2)[world.rank] for part in batch()), trace=False)
        engine.save_pretrained(tmp_path / "adapter")
        engine.save_pretrained(tmp_path / "merged", merge=True)

    threaded(2, run, plan="dp2:zero3 ep2")
    inputs, _ = batch()

    def loaded(folder: Path | None) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        base, merged = loaded(truth.base), loaded(tmp_path / "merged")
        plain = base(inputs).logits
        wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").double()
        adapted = wrapped(inputs).logits
        torch.testing.assert_close(merged(inputs).logits, adapted, rtol=1e-7, atol=1e-7)
        assert (adapted - plain).abs().max() > 1e-2
