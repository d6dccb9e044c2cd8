"""Families that make parameters by calls which take no default device, and families without a
table of roles.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from plait import models
from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.stages.cut import Cutting
from plait.engine.state.init import is_meta
from plait.errors import ModelError
from plait.models.losses import cross_entropy
from tests.helpers.threaded import threaded

pytest.importorskip("transformers")

TOKENS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
DIFFLLAMA = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
DIFFLLAMA |= {"num_key_value_heads": 4, "intermediate_size": 32, "max_position_embeddings": 16}
XLNET = {"d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 32, "dropout": 0.0}
CTRL = {"n_embd": 16, "n_layer": 2, "n_head": 4, "dff": 32, "n_positions": 16}
MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "diffllama": DIFFLLAMA,
    "xlnet": XLNET,
    "ctrl": CTRL,
    "mamba": MAMBA,
}


def loss_of_a_step(world: World, model: nn.Module, plan: str) -> float:
    engine = build(
        copy.deepcopy(model),
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(seed=1, cutting=Cutting(example=torch.zeros(1, 8, dtype=torch.long))),
        world=world,
    )
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(0))
    worker, size = world.worker
    own = tokens.tensor_split(size)[worker]
    return float(engine.step((own[:, :-1], own[:, 1:]), trace=False).loss)


def made(family: str) -> nn.Module:
    """Made before the threads, which share one generator: some families draw while they are
    made.
    """
    return models.make("hf", config={"model_type": family, **TOKENS, **CONFIGS[family]})


@pytest.mark.parametrize("family", ["diffllama", "xlnet"])
def test_parameters_that_are_made_with_values_start_as_the_others(family: str) -> None:
    """Threads share one generator, which a pipeline watches for draws: no stages here."""
    expected = threaded(1, loss_of_a_step, made(family), "dp1", plan="dp1")[0]
    losses = threaded(2, loss_of_a_step, made(family), "dp2:zero3", plan="dp2:zero3")
    assert losses == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("diffllama", "tp2"),
        ("xlnet", "tp2"),
        ("mamba", "tp2"),
        ("mamba", "cp2:ring"),
    ],
)
def test_a_family_without_a_plan_is_split_as_its_dataflow_says(family: str, plan: str) -> None:
    expected = threaded(1, loss_of_a_step, made(family), "dp1", plan="dp1")[0]
    losses = threaded(2, loss_of_a_step, made(family), plan, plan=plan)
    assert losses == pytest.approx([expected] * 2, rel=1e-5)


def test_what_has_values_on_a_meta_model_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.add_module("more", nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"more.weight, more.bias .* have values, and 4 tensors"):
        is_meta(model)
