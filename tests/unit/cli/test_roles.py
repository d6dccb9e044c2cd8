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
