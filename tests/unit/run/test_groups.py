"""Groups of parameters by pattern: what a config says, refuses and freezes."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config import Config
from plait.errors import ConfigError, ModelError
from plait.run import assemble
from plait.run.optimizers import settings_of

MODEL = {
    "name": "gpt",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
}


def load(*groups: dict[str, Any], **train: Any) -> Config:
    return Config.load({"model": MODEL, "train": {**train, "groups": list(groups)}})


def test_the_first_group_that_fits_decides_and_no_decay_serves_the_others():
    config = load(
        {"match": "*.bias", "weight_decay": 0.5},
        {"match": "blocks.*", "lr": 0.1},
        no_decay=["norm", "bias"],
        weight_decay=0.2,
        lr=0.01,
    )
    train = config.train
    assert settings_of("blocks.0.norm1.bias", train) == (0.01, 0.5)
    assert settings_of("blocks.0.norm1.weight", train) == (0.1, 0.0)
    assert settings_of("blocks.0.mlp.up.weight", train) == (0.1, 0.2)
    assert settings_of("embed.weight", train) == (0.01, 0.2)
    assert Config.load(config.as_dict()).train.groups == train.groups


def test_frozen_parameters_do_not_train():
    keys = assemble.model_keys(load({"match": "embed*", "freeze": True}))
    for model in (assemble.make_model(keys), assemble.bare_model(keys)):
        assert not model.embed.weight.requires_grad
        assert model.head.weight.requires_grad
    everything = assemble.model_keys(load({"match": "*", "freeze": True}))
    with pytest.raises(ModelError, match="freeze every parameter"):
        assemble.make_model(everything)


@pytest.mark.parametrize(
    ("group", "complaint"),
    [
        ({"match": "*"}, r"train.groups\[0\] \('\*'\) changes nothing"),
        ({"match": "*", "freeze": True, "lr": 0.1}, "is frozen, so lr says nothing"),
        ({"lr": 0.1}, r"train.groups\[0\].match is missing"),
        ({"match": "*", "lrr": 0.1}, r"unknown key train.groups\[0\].lrr; did you mean 'lr'"),
        ({"match": "*", "lr": -1.0}, r"train.groups\[0\].lr = -1.0 is wrong"),
    ],
)
def test_groups_at_fault_are_named(group: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(group)


def test_a_function_makes_its_own_groups():
    with pytest.raises(ConfigError, match="makes its own groups"):
        load({"match": "*", "lr": 0.1}, optimizer="mine:lion")
