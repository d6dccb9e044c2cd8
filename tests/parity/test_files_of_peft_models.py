"""What is trained of a model that PEFT has wrapped goes back into PEFT by its own files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import build
from plait.errors import CheckpointError
from plait.models import losses
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.families import HUGGING_FACE
from tests.parity.harness import TOLERANCE, optimizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def base() -> Any:
    settings = transformers.AutoConfig.for_model(**HUGGING_FACE["hf-qwen2"])
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(settings).double()


def wrapped(name: str) -> Any:
    """With a norm that is trained whole, and adapters with values."""
    lora = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["norm"],
        init_lora_weights=False,
        use_dora=name == "dora",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, at what PEFT asks it
        return peft.get_peft_model(base(), lora, adapter_name=name).double()


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 28, (8, 9), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


def loss(output: Any, targets: Tensor) -> Any:
    return losses.cross_entropy(output.logits, targets)


def trained(world: World, plan: str, model: nn.Module, path: Path, **how: bool) -> float:
    """The loss behind a step; the adapters are saved."""
    engine = build(model, f"{plan} precision:float64", loss=loss, optimizer=optimizer, world=world)
    axis = world.axis("dp")
    mine = tuple(part.tensor_split(axis.size)[axis.rank] for part in batch())
    engine.step(mine)
    written = engine.save_pretrained(path, **how)
    assert {one.name for one in written} == {"adapter_model.safetensors", "adapter_config.json"}
    return engine.evaluate(mine)


@pytest.mark.parametrize("name", ["default", "mine", "dora"])
@pytest.mark.parametrize("plan", ["dp2:zero3", "tp2", "pp2 dp2"])
def test_peft_loads_what_was_trained_of_its_model(plan: str, name: str, tmp_path: Path) -> None:
    size = Plan.parse(plan).world_size
    models = [wrapped(name) for _ in range(size)]

    def train(world: World) -> float:
        return trained(world, plan, models[world.rank], tmp_path)

    found = threaded(size, train, plan=plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(base(), tmp_path).double()
        merged = loaded.merge_and_unload().eval()
    inputs, targets = batch()
    with torch.no_grad():
        total, count = loss(merged(inputs), targets)
    torch.testing.assert_close(found[0], float(total / count), rtol=TOLERANCE, atol=0)


def test_a_merge_by_the_engine_is_refused_with_the_cure(tmp_path: Path) -> None:
    model = wrapped("default")

    def train(world: World) -> float:
        return trained(world, "dp1", model, tmp_path, merge=True)

    with pytest.raises(CheckpointError, match="merge_and_unload"):
        threaded(1, train, plan="dp1")
