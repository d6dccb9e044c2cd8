"""`plait roles`: the table that splits a model's layers, and its cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli.entry import main

CONFIG = """
[model]
name = "hf"
[model.config]
model_type = "phi3"
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 48
vocab_size = 64
pad_token_id = 0
eos_token_id = 0
[data]
name = "random"
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return str(path)


def test_the_table_can_be_pasted(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["roles", config]) == 0
    printed = capsys.readouterr().out
    assert '"model.model.layers.*.self_attn.qkv_proj" = "column 32+16+16"' in printed
    path = Path(config)
    path.write_text(CONFIG + printed)
    assert main(["roles", config, "--json"]) == 0
    pasted = json.loads(capsys.readouterr().out)
    assert pasted["roles"]["model.lm_head"] == "head"
    assert pasted["parameters_per_rank"] < 0.7 * pasted["parameters"]


def test_a_tensor_axis_of_one_rank_is_refused(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["roles", config, "--ranks", "1"]) == 2
    assert "2 or more" in capsys.readouterr().err


def test_a_module_of_ones_own_gets_a_table_from_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
import torch

def model():
    layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)]
    return torch.nn.Sequential(*layers)

def data():
    return torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(4, (16,)))
"""
    (tmp_path / "own_layers.py").write_text(code)
    config = tmp_path / "own.toml"
    config.write_text(
        '[model]\npython = "own_layers:model"\n[data]\npython = "own_layers:data"\n'
        "[train]\nsteps = 1\nglobal_batch = 8\n"
    )
    assert main(["roles", str(config), "--json"]) == 0
    roles = json.loads(capsys.readouterr().out)["roles"]
    assert roles["0"] == "column" and roles["2"] == "row"
