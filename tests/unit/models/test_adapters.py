"""Adapters on a model: what they go on, what they refuse, and where their files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait import models
from plait.cli import main
from plait.config import Config
from plait.errors import ConfigError, ModelError
from plait.models.adapter_parts import AdapterSettings
from plait.models.adapters import adapt, adapted

GPT: dict[str, Any] = {
    "name": "gpt",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 256,
}


def gpt() -> nn.Module:
    with torch.device("meta"):
        return models.make(**GPT)


def test_every_linear_layer_but_the_output_has_an_adapter_by_default() -> None:
    model = adapt(gpt(), AdapterSettings(rank=2))
    layers = adapted(model)
    assert layers and all(name.startswith("blocks.") for name in layers)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    expected = {f"{name}.{part}.weight" for name in layers for part in ("lora_A", "lora_B")}
    assert trained == expected


def test_the_output_has_one_where_it_is_named() -> None:
    assert set(adapted(adapt(gpt(), AdapterSettings(targets=("head",))))) == {"head"}


def test_layers_whose_weights_another_module_takes_have_none() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert set(adapted(adapt(model, AdapterSettings()))) == {"1"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kind": "lorra"}, "did you mean 'lora'"),
        ({"rank": 0}, "at least rank 1"),
        ({"targets": ("donw",)}, "no linear layer is called 'donw'; did you mean 'down'"),
        ({"targets": ("embed",)}, "is a Embedding, and adapters go on linear layers"),
        ({"dropout": 1.0}, "from 0 to below 1"),
        ({"alpha": 0.0}, "more than 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(keys: dict[str, Any], words: str) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "down": nn.Linear(4, 4)})
    with pytest.raises(ModelError, match="adapter") as caught:
        adapt(model, AdapterSettings(**keys))
    assert words in str(caught.value)


def test_a_config_says_what_is_wrong_with_its_adapter() -> None:
    with pytest.raises(ConfigError, match=r"adapter.rank = 0 is wrong: it must be 1 or more"):
        Config.load({"model": GPT, "adapter": {"kind": "lora", "rank": 0}})
    with pytest.raises(ConfigError, match=r"adapter.kind = 'lorra' .* did you mean 'lora'"):
        Config.load({"model": GPT, "adapter": {"kind": "lorra"}})
    with pytest.raises(ConfigError, match=r"unknown key adapter.ranks; did you mean 'rank'"):
        Config.load({"model": GPT, "adapter": {"kind": "lora", "ranks": 2}})


def test_targets_that_match_nothing_are_refused_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.load({"model": GPT, "adapter": {"kind": "lora", "targets": ["q_prj"]}})
    (tmp_path / "run.toml").write_text(config.to_toml())
    train = ["train", str(tmp_path / "run.toml"), "--plan", "dp2", "--out", str(tmp_path / "out")]
    assert main(train) == 2
    assert "no linear layer is called 'q_prj'; known: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_paths_of_a_model_are_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a path that is not there, the working folder is meant, as ever."""
    (tmp_path / "weights").mkdir()
    text = '[model]\nname = "hf"\nconfig = "weights"\nweights = "elsewhere"\n'
    (tmp_path / "run.toml").write_text(f'{text}[adapter]\nkind = "lora"\nweights = "weights"\n')
    monkeypatch.chdir("/")
    loaded = Config.load(tmp_path / "run.toml")
    keys = loaded.model.keys_for_factory()
    assert keys["config"] == loaded.adapter.weights == str(tmp_path / "weights")
    assert keys["weights"] == "elsewhere"


def test_what_other_code_calls_adapter_is_none() -> None:
    """Wav2Vec2 has an attribute of that name, and users have modules."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.adapter = None
    model[0].adapter = nn.Linear(2, 2)
    assert not adapted(model)
