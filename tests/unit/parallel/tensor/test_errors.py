"""Every misfit of a table of roles, a model and a grid is an error that names the thing, the
numbers and the cure.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from plait import models
from plait.comm import World
from plait.errors import ModelError, PlanError
from plait.parallel.tensor import apply, layers
from plait.plan import Plan
from tests.unit.parallel.tensor.pairs import group_of, run_ranks, split_with_values

GPT = {
    "num_hidden_layers": 1,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 44,
    "max_position_embeddings": 8,
}


def gpt(**keys: int) -> nn.Module:
    with torch.device("meta"):
        return models.make("gpt", **{**GPT, **keys})


def refused(plan: str, model: nn.Module, roles: dict[str, str] | None = None) -> str:
    table = models.roles_for(model) if roles is None else roles
    with pytest.raises(ModelError) as caught:
        run_ranks(plan, lambda world: apply(copy.deepcopy(model), table, group_of(world, plan)))
    return str(caught.value)


def test_a_grid_that_is_no_square() -> None:
    with pytest.raises(
        PlanError, match="tp6:2d needs a square number of ranks; the nearest are tp4:2d and tp9:2d"
    ):
        Plan.parse("tp6:2d").check()


def test_heads_that_do_not_divide() -> None:
    said = refused("tp2", gpt(num_attention_heads=3))
    assert (
        "blocks.*.attention.q (column): heads 3 must be a multiple of 2; the nearest are 2 and 4"
        in said
    )


def test_a_vocabulary_that_does_not_divide() -> None:
    said = refused("tp4", gpt(vocab_size=50))
    assert (
        "head (head): the vocabulary 50 must be a multiple of 4; the nearest are 48 and 52" in said
    )
    assert "embed (embedding): the vocabulary 50" in said


def test_features_that_do_not_divide() -> None:
    said = refused("tp9:2d", gpt(hidden_size=20, vocab_size=45, intermediate_size=36))
    assert (
        "embed (embedding): features 20 must be a multiple of 3; the nearest are 18 and 21" in said
    )


def test_a_weight_that_is_computed_from_others() -> None:
    model = gpt()
    weight_norm(model.get_submodule("blocks.0.mlp.up"))
    inner = {"blocks.0.mlp.up.parametrizations.weight": "replicated"}
    said = refused("tp2", model, {**models.roles_of("gpt"), **inner})
    assert "'blocks.0.mlp.up' (ParametrizedLinear) computes its weight from other" in said
    assert said.endswith("take tp out of the plan")


def test_a_role_that_matches_nothing() -> None:
    said = refused("tp2", gpt(), {**models.roles_of("gpt"), "blocks.*.mlp.gate": "column"})
    assert "no module matches 'blocks.*.mlp.gate' (column)" in said


def test_a_word_that_is_no_role() -> None:
    assert "'colum' is no role; did you mean 'column'?" in refused(
        "tp2", gpt(), {**models.roles_of("gpt"), "head": "colum"}
    )


def test_parameters_without_a_role() -> None:
    table = {
        pattern: role
        for pattern, role in models.roles_of("gpt").items()
        if pattern != "blocks.*.mlp.down"
    }
    said = refused("tp2", gpt(), table)
    assert (
        "no role covers 1 modules that have parameters: blocks.0.mlp.down (Linear: weight, bias)"
        in said
    )


def test_a_column_without_its_row_names_the_module() -> None:
    model = models.make("gpt", **GPT)
    table = {**models.roles_of("gpt"), "blocks.*.mlp.down": "replicated"}

    def rank(world: World) -> None:
        own = copy.deepcopy(model)
        split_with_values(world, own, table, "tp2")
        own(torch.zeros(1, 8, dtype=torch.long))

    with pytest.raises(
        ModelError, match=r"'blocks.0.mlp.down' \(replicated\) gets 48 features and expects all 96"
    ):
        run_ranks("tp2", rank)


def test_a_mask_of_a_part_of_the_sequence() -> None:
    layers.check_mask("attention", torch.ones(1, 1, 8, 8), 8)
    with pytest.raises(
        ModelError,
        match=r"'attention' gets a mask of 4 positions for a sequence of 8: .* without sp",
    ):
        layers.check_mask("attention", torch.ones(1, 1, 4, 4), 8)


def neox(num_attention_heads: int, hidden_size: int) -> nn.Module:
    config = {
        "model_type": "gpt_neox",
        "num_hidden_layers": 1,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "intermediate_size": 24,
        "vocab_size": 28,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return models.make("hf", config=config)


def test_fused_heads_that_do_not_divide() -> None:
    """q, k and v of a head lie side by side: 3 x 18 features are 3 heads, not 9.

    The model's own table leaves such a layer whole; that of a model of 4 heads asks for a split.
    """
    model = neox(num_attention_heads=3, hidden_size=18)
    packed = "model.gpt_neox.layers.*.attention.query_key_value"
    assert models.roles_for(model)[packed] == "replicated"
    table = models.roles_for(neox(num_attention_heads=4, hidden_size=24))
    assert table[packed] == "column"
    said = refused("tp2", model, table)
    assert (
        "layers.*.attention.query_key_value (column): heads 3 must be a multiple of 2; the "
        "nearest are 2 and 4" in said
    )


def test_a_table_that_splits_nothing() -> None:
    with torch.device("meta"):
        resnet = models.make("resnet", depth=18, num_classes=7, in_channels=2, width=4)
    assert "would split nothing" in refused("tp2", resnet)


def test_nothing_is_changed_by_a_refusal() -> None:
    model = gpt(vocab_size=45)
    before = {name: tuple(param.shape) for name, param in model.named_parameters()}
    refused("tp2", model)
    assert {name: tuple(param.shape) for name, param in model.named_parameters()} == before
