"""Roles that the dataflow of a forward gives, as they are written in a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.models import hf
from plait.models.derived.table import Table, derive
from plait.models.hf_roles import derived_table

pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
MLP = {"intermediate_size": 48}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 4, "n_group": 2}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "topk_group": 2}
LATENT |= {"num_key_value_heads": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2}


def roles(model_type: str, task: str = "causal", size: int = 2, **config: Any) -> dict[str, str]:
    model = hf.make({"model_type": model_type, **config}, task=task)
    found = derived_table(model, size).roles
    return {name.removeprefix("model."): role for name, role in found.items()}


def test_latent_attention_spreads_what_its_heads_share() -> None:
    found = roles("deepseek_v3", **SMALL, **MLP, **LATENT)
    attention = "model.layers.*.self_attn"
    assert found[f"{attention}.q_a_proj"] == "replicated"
    assert found[f"{attention}.q_b_proj"] == "column"
    assert found[f"{attention}.kv_a_proj_with_mqa"] == "spread"
    assert found[f"{attention}.kv_a_layernorm"] == "inside"
    assert found[f"{attention}.kv_b_proj"] == "column_inside"
    assert found[f"{attention}.o_proj"] == "row"


def test_packed_projections_say_their_parts() -> None:
    found = roles("phi3", **SMALL, **MLP, num_key_value_heads=2, pad_token_id=0)
    assert found["model.layers.*.self_attn.qkv_proj"] == "column 32+16+16"
    numbers = found["model.layers.*.self_attn"].split()
    assert sorted(numbers) == ["config.num_attention_heads", "num_key_value_heads", "share"]
    assert found["model.layers.*.mlp.gate_up_proj"] == "column 48+48"
    assert found["lm_head"] == "head"


def test_heads_that_are_not_divided_stay_whole() -> None:
    found = roles("phi3", size=4, **SMALL, **MLP, num_key_value_heads=2, pad_token_id=0)
    assert found["model.layers.*.self_attn.qkv_proj"] == "replicated"
    assert found["model.layers.*.mlp.gate_up_proj"] == "column 48+48"


def test_relative_positions_of_all_layers_are_cut_with_the_heads() -> None:
    t5 = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    found = roles("t5", "seq2seq", **t5, vocab_size=64, decoder_start_token_id=0)
    table = "encoder.block.*.layer.*.SelfAttention.relative_attention_bias"
    assert found[table] == "share weight:1"
    assert found["decoder.block.*.layer.*.EncDecAttention.o"] == "row"


class Split(nn.Module):
    """Half of a packed layer goes to a row, and the other half is used whole."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"pack": nn.Linear(8, 16), "down": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = self.model["pack"](x).split(8, -1)
        return self.model["down"](inner.relu()) + outer


class Softmax(nn.Module):
    """What lies between two layers mixes the features."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})

    def forward(self, x: Tensor) -> Tensor:
        return self.model["down"](self.model["up"](x).softmax(-1))


class Fixed(nn.Module):
    """A reshape to a number that is written in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})

    def forward(self, x: Tensor) -> Tensor:
        heads = self.model["up"](x).view(-1, 4, 4).softmax(-1)
        return self.model["down"](heads.reshape(-1, 16))


class Counted(nn.Module):
    """A reshape to a number that the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        self.heads = 4

    def forward(self, x: Tensor) -> Tensor:
        heads = self.model["up"](x).view(-1, self.heads, 4).softmax(-1)
        return self.model["down"](heads.reshape(len(x), -1))


class Holder(nn.Module):
    """A model whose inner module counts heads."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Counted()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def table_of(model: nn.Module) -> Table:
    return derive(model, lambda: model(torch.zeros(2, 8)), 2)


@pytest.mark.parametrize("model", [Split(), Softmax(), Fixed()], ids=lambda one: type(one).__name__)
def test_what_cannot_be_cut_stays_whole_with_a_note(model: nn.Module) -> None:
    table = table_of(model)
    assert set(table.roles.values()) == {"whole", "replicated"}
    assert len(table.notes) == 2
    assert model.training
    assert "forward" not in vars(model.model["down"])


def test_a_number_of_heads_in_the_code_is_divided() -> None:
    model = Holder()
    table = table_of(model)
    assert table.roles["model"] == "share heads"
    assert table.roles["model.model.up"] == "column"
    assert table.roles["model.model.down"] == "row"
    assert table.notes == []
    assert model.model.heads == 4


class OtherInTraining(nn.Module):
    """A row by its calls; in training the code takes its weight, clipped, without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        if not self.training:
            return self.down(x)
        self.down.weight.data.clamp_(-3, 3)
        return nn.functional.linear(x, self.down.weight.clamp(-3, 3))


def test_a_weight_that_training_takes_without_its_layer_is_whole() -> None:
    model = OtherInTraining().to("meta").train()
    found = derive(model, lambda: model(torch.zeros(2, 8)), 2).roles
    assert found["down"] == found["up"] == "replicated"
    assert model.training and model.up.training


class Gate(nn.Module):
    """A layer with its activation, which has no parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.proj(x))


def test_a_pattern_names_no_module_that_has_no_role() -> None:
    nets = [nn.Sequential(Gate(), nn.Identity(), nn.Linear(16, 8)) for _ in range(2)]
    model = nn.ModuleDict({"nets": nn.ModuleList(nets)}).to("meta")
    found = derive(model, lambda: [net(torch.zeros(2, 8)) for net in model["nets"]], 2).roles
    assert found == {"": "whole", "nets.*.*.proj": "column", "nets.*.2": "row"}


class Scaled(nn.Module):
    """A width that splits a packed layer, and scales: half of it would scale otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.pack, self.down = nn.Linear(8, 24), nn.Linear(8, 8)
        self.width, self.heads = 8, 2

    def forward(self, x: Tensor) -> Tensor:
        samples, width = x.shape
        shape = (samples, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(0, 1) for part in self.pack(x).split(self.width, -1))
        scores = q @ k.transpose(-2, -1) * (self.width // self.heads) ** -0.5
        mixed = (scores.softmax(-1) @ v).transpose(0, 1)
        return self.down(mixed.reshape(samples, width))


def test_a_number_that_scales_is_not_divided() -> None:
    table = table_of(nn.Sequential(Scaled()))
    assert set(table.roles.values()) == {"whole", "replicated"}
    of_pack, of_down = table.notes
    assert of_pack == "0.pack is computed alike on every rank"
    assert of_down.startswith("0.down is computed alike on every rank: test_roles.py:")
    assert "a rank computes with 0.70710678" in of_down
