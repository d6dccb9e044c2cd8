"""Reading a config: files, mappings, overrides, defaults, and the way back to TOML."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from plait.config import Config, load
from plait.errors import ConfigError

GPT: dict[str, Any] = {
    "name": "gpt",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 256,
}

EXAMPLE = """
[model]
name = "gpt"
num_hidden_layers = 8
hidden_size = 256
num_attention_heads = 8
intermediate_size = 1024
vocab_size = 256
tie_word_embeddings = false
[data]
name = "stdlib"
seq_len = 128
[train]
steps = 200
global_batch = 16
optimizer = "adamw"
lr = 1e-3
seed = 0
[plan]
text = "dp2:zero3"
[cluster]
name = "local"
"""


def refused(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(source, overrides)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(EXAMPLE)
    return file


def test_the_example_of_the_contract(path: Path) -> None:
    config = Config.load(path)
    assert config.model.keys_for_factory() == {
        "name": "gpt",
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "dropout": 0.0,
        "max_position_embeddings": 1024,
        "layer_norm_epsilon": 1e-5,
    }
    assert (config.data.name, config.data.seq_len) == ("stdlib", 128)
    assert (config.train.steps, config.train.global_batch, config.train.lr) == (200, 16, 1e-3)
    assert (config.plan.text, config.cluster.name) == ("dp2:zero3", "local")
    assert config == load(str(path))


def test_defaults_are_those_of_a_first_run() -> None:
    config = Config.load({"model": GPT})
    assert (config.plan.text, config.cluster.name, config.data.name) == ("dp1", "local", "random")
    assert config.data.seq_len == 128
    assert config.train.betas == (0.9, 0.999)
    assert config.train.clip_grad_norm is None and config.train.checkpoint_every == 0
    assert config.model.keys_for_factory()["intermediate_size"] == 128


def test_seq_len_defaults_to_what_the_model_has() -> None:
    assert Config.load({"model": {**GPT, "max_position_embeddings": 64}}).data.seq_len == 64
    table = {"name": "hf", "config": {"model_type": "gpt2", "n_positions": 32}}
    assert Config.load({"model": table}).data.seq_len == 32
    mlp = {
        "name": "mlp",
        "in_features": 64,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "out_features": 10,
    }
    assert Config.load({"model": mlp, "data": {"name": "digits"}}).data.seq_len is None


SOURCES: list[dict[str, Any]] = [
    {"model": GPT},
    {
        "model": {
            **GPT,
            "name": "llama",
            "num_key_value_heads": 2,
            "rope_theta": 5e5,
            "head_dim": 16,
        }
    },
    {
        "model": {
            "name": "hf",
            "config": {
                "model_type": "gpt2",
                "n_layer": 1,
                "odd key": [1, {"a": 1.5, "b": "ü\x7f\n\"'"}],
            },
        }
    },
    {"model": {"name": "hf", "config": Path("a/config.json"), "weights": "w"}},
    {"model": {"python": "m:f", "arguments": {"width": 3, "name": "x"}}, "data": {"python": "d:g"}},
    {"model": {"name": "resnet", "depth": 50, "in_channels": 1}, "data": {"name": "digits"}},
    {
        "model": {"name": "fno", "hidden_size": 8, "num_hidden_layers": 1, "modes": 4},
        "data": {"python": "d:g"},
    },
    {
        "model": GPT,
        "train": {
            "betas": [0.8, 0.9],
            "clip_grad_norm": 1.0,
            "loss": "m:l",
            "lr": 1e-20,
            "num_servers": 1,
        },
    },
    {"model": GPT, "data": {"name": "text", "files": [Path("a b.txt"), "c\\d"], "seed": 3}},
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_config_survives_the_way_there_and_back(source: dict[str, Any], tmp_path: Path) -> None:
    config = Config.load(source)
    file = tmp_path / "again.toml"
    file.write_text(config.to_toml())
    again = Config.load(file)
    assert Config.load(json.loads(json.dumps(config.as_dict()))) == config
    assert again.as_dict() == config.as_dict() and again == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert Config.load(config) == config


def test_a_config_is_frozen() -> None:
    config = Config.load({"model": GPT})
    with pytest.raises(ValidationError):
        config.train.lr = 1.0  # type: ignore[misc]
    assert Config.load(config, ["train.lr=1"]).train.lr == 1 and config.train.lr == 1e-3


def test_the_source_is_not_changed() -> None:
    source = {"model": dict(GPT), "train": {"steps": 3}}
    Config.load(source, ["train.steps=4", "model.dropout=0.5"])
    assert source == {"model": GPT, "train": {"steps": 3}}


def test_overrides(path: Path) -> None:
    config = Config.load(
        path,
        [
            "train.lr=3e-4",
            "train.betas=[0.8, 0.9]",
            "plan.text=pp2 tp2 mb4",
            "cluster.name=h100x8",
            "model.tie_word_embeddings=true",
            'data.name="random"',
            "train.optimizer = sgd",
            "train.lr=5e-4",
        ],
    )
    assert (config.train.lr, config.train.betas, config.train.optimizer) == (
        5e-4,
        (0.8, 0.9),
        "sgd",
    )
    assert (config.plan.text, config.cluster.name, config.data.name) == (
        "pp2 tp2 mb4",
        "h100x8",
        "random",
    )
    assert config.model.keys_for_factory()["tie_word_embeddings"] is True


def test_overrides_reach_inner_tables_and_new_sections() -> None:
    source = {"model": {"python": "m:f"}, "data": {"python": "d:g"}}
    config = Config.load(source, ["model.arguments.width=3", "train.steps=7"])
    assert config.model.keys_for_factory() == {"python": "m:f", "arguments": {"width": 3}}
    assert config.train.steps == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=3", "override 'lr=3' is not of the form section.key=value, as in train.lr=1e-3"),
        ("train.lr", "override 'train.lr' is not of the form section.key=value"),
        ("train.=3", "is not of the form section.key=value"),
        ("trian.lr=3", "override 'trian.lr=3': unknown section 'trian'; did you mean 'train'?"),
        ("optimizer.lr=3", "unknown section 'optimizer'; did you mean 'train.lr'?"),
        ("optimizer.kind=3", "unknown section 'optimizer'; it is a key of [train]"),
        ("scheduler.warmup=3", "'scheduler'; did you mean 'train.schedule'?"),
        ("checkpoint.each=3", "'checkpoint'; did you mean 'train.checkpoint_every'?"),
        ("train.lrr=3", "unknown key train.lrr; did you mean 'lr'?"),
        ("train.lr=fast", "train.lr = 'fast' is wrong: it must be a number"),
        (
            "train.steps.more=1",
            "override 'train.steps.more=1': steps is 200, which has no keys of its own",
        ),
    ],
)
def test_overrides_that_cannot_be(path: Path, override: str, message: str) -> None:
    assert message in refused(path, override)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    beside = f"there is no .toml file in {tmp_path}"
    missing = f"{tmp_path}/none.toml: there is no such file; {beside}"
    assert refused(tmp_path / "none.toml") == missing
    assert refused(tmp_path) == f"{tmp_path}: this is a directory, not a TOML file; {beside}"
    assert f"there is no folder {tmp_path}/no either" in refused(tmp_path / "no" / "none.toml")
    file = tmp_path / "bad.toml"
    file.write_text("[model]\nname = gpt\n")
    assert refused(file).startswith(f"{file}: this is not valid TOML: ") and "line 2" in refused(
        file
    )
    file.write_bytes(b"\xff\xfe")
    assert "cannot be read as text" in refused(file)
    assert f"did you mean '{file}'?" in refused(tmp_path / "bda.toml")
    assert f"{tmp_path}/ has bad.toml" in refused(tmp_path / "quite_another.toml")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert "you may not read this file or its folder" in refused(tmp_path / "mine.toml")
