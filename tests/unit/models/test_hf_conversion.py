"""Weights that a family's files name or cut otherwise than its model does, both ways."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.comm import World
from plait.engine.build import build
from plait.models import hf, losses
from plait.models.weights import open_folder
from plait.plan import Plan
from tests.helpers.threaded import threaded

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen2_moe": {**SIZES, "num_experts": 4},
    "phimoe": {**SIZES, "num_local_experts": 4},
}


def saved(family: str, folder: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_experts_are_read_by_slices(family: str, tmp_path: Path) -> None:
    theirs = saved(family, tmp_path)
    params = dict(theirs.named_parameters())
    assert not params.keys() <= open_folder(tmp_path).keys()
    weights = hf.make(tmp_path, weights=tmp_path).weights
    assert weights is not None
    for name, param in params.items():
        half = [slice(size // 2, size) for size in param.shape]
        with weights.reading() as reader:
            assert torch.equal(reader.read(f"model.{name}"), param)
        with weights.reading() as reader:
            assert torch.equal(reader.read(f"model.{name}", half), param[tuple(half)])
            if name.endswith("gate_up_proj"):
                assert reader.num_bytes == param.nbytes // 2


@pytest.mark.parametrize("plan", ["dp2:zero3", "tp2", "dp2 ep2"])
def test_a_round_trip_is_equal_to_the_bit(plan: str, tmp_path: Path) -> None:
    theirs = saved("mixtral", tmp_path / "theirs")
    whole = hf.make(tmp_path / "theirs", weights=tmp_path / "theirs")

    def rank(world: World) -> None:
        engine = build(
            copy.deepcopy(whole),
            plan,
            loss=losses.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            world=world,
        )
        engine.save_pretrained(tmp_path / "ours")

    threaded(Plan.parse(plan).world_size, rank, plan=plan)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(ours.eval()(ids).logits, theirs.eval()(ids).logits)
