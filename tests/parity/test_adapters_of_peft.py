"""Models of `transformers` that PEFT has wrapped, as they are: equal to PEFT on one device."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm import World
from plait.engine.build import build
from plait.models import losses
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.families import HUGGING_FACE
from tests.parity.harness import TOLERANCE, join, optimizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

STEPS = 2
NO_EXPERTS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": HUGGING_FACE["hf-qwen2"],
    "qwen2_moe": {
        **HUGGING_FACE["hf-qwen2"],
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 16,
    },
}


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 28, (8, 9), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output: Any, targets: Tensor) -> Any:
    return losses.cross_entropy(output.logits, targets)


@functools.cache
def wrapped(family: str) -> Any:
    """In float64. Both matrices of each adapter have values, so that both have gradients."""
    settings = transformers.AutoConfig.for_model(**CONFIGS[family])
    settings._experts_implementation = "eager"  # the grouped product has no float64
    targets = NO_EXPERTS if family == "qwen2" else ("q_proj", "o_proj")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list(targets),
        target_parameters=experts if family == "qwen2_moe" else None,
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_config(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, at what PEFT asks it
        return peft.get_peft_model(base, lora).double().train()


@functools.cache
def alone(family: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The losses of PEFT on one device, and what it trains, before and behind the steps."""
    model = copy.deepcopy(wrapped(family))
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    start = {name: param.detach().clone() for name, param in trained.items()}
    updates = optimizer(list(trained.values()))
    found = []
    inputs, targets = batch()
    for _ in range(STEPS):
        total, count = loss(model(inputs), targets)
        (total / count).backward()
        updates.step()
        updates.zero_grad()
        found.append(float((total / count).detach()))
    return found, start, {name: param.detach() for name, param in trained.items()}


def train(world: World, plan: str, model: Any) -> Any:
    engine = build(
        copy.deepcopy(model),
        f"{plan} precision:float64",
        loss=loss,
        optimizer=optimizer,
        world=world,
    )
    axis = world.axis("dp")
    mine = tuple(part.tensor_split(axis.size)[axis.rank] for part in batch())
    found = [engine.step(mine, trace=False).loss for _ in range(STEPS)]
    parts = [
        (part.name, part.global_shape, part.index(), part.values.detach().clone())
        for part in engine.local_parameters()
    ]
    return found, parts


def _equals_peft(family: str, plan: str) -> None:
    losses_alone, start, expected = alone(family)
    results = threaded(Plan.parse(plan).world_size, train, plan, wrapped(family), plan=plan)
    for found, _ in results:
        torch.testing.assert_close(found, losses_alone, rtol=TOLERANCE, atol=0)
    together = join([parts for _, parts in results])
    for name, value in expected.items():
        assert (value - start[name]).abs().max() > 1e-6, f"{name} has not moved"
        error = (together[name].view_as(value) - value).abs().max() / value.abs().max()
        assert error < TOLERANCE, (name, float(error))


@pytest.mark.parametrize("plan", ["cp2:ring", "tp2 dp2:zero3"])
def test_a_model_of_the_library_with_adapters_trains_as_with_peft_alone(plan: str) -> None:
    _equals_peft("qwen2", plan)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("qwen2", "dp2"),
        ("qwen2", "dp2:zero3"),
        ("qwen2", "tp2"),
        ("qwen2", "pp2:1f1b mb2"),
        ("qwen2", "cp2:ulysses"),
        ("qwen2", "cp2:ulysses tp2 dp2:zero3"),
        ("qwen2", "pp2:1f1b tp2 dp2:zero1 mb2"),
        ("qwen2_moe", "dp2 ep2"),
        ("qwen2_moe", "dp2:zero3 ep2"),
        ("qwen2_moe", "dp2 ep2 tp2"),
    ],
)
def test_under_every_other_axis_and_products_of_them(family: str, plan: str) -> None:
    _equals_peft(family, plan)
