"""`plait estimate` prices what `plait train` would refuse, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from plait.cli.entry import main
from plait.cli.estimate import notes
from plait.plan import Plan
from plait.predict.cost import describe
from plait.predict.cost.model.modules import describe_by_running

TABLES = {
    "model": {
        "name": "gpt",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 256,
    },
    "data": {"seq_len": 32},
}


@pytest.mark.parametrize(
    ("plan", "said"), [("tp2 cp2", []), ("tp3", ["num_attention_heads 4"]), ("cp5", ["seq_len 32"])]
)
def test_a_plan_that_would_be_refused_is_said_to_be(plan: str, said: list[str]) -> None:
    found = notes(describe(TABLES), Plan.parse(plan))
    assert len(found) == len(said) and all(
        word in note for word, note in zip(said, found, strict=True)
    )


def test_a_config_of_a_library_has_keys_of_its_own() -> None:
    table = {
        "model_type": "gpt2",
        "n_head": 12,
        "n_embd": 96,
        "n_layer": 2,
        "vocab_size": 100,
        "rope_scaling": {"factor": 2},
    }
    model = describe({"model": table})
    assert notes(model, Plan.parse("tp2")) == []
    assert "num_attention_heads 12" in notes(model, Plan.parse("tp5"))[0]


def test_a_context_axis_needs_attention() -> None:
    mlp = describe(
        {
            "name": "mlp",
            "in_features": 8,
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "out_features": 4,
        }
    )
    assert "has none" in notes(mlp, Plan.parse("cp2"))[0]
    assert notes(mlp, Plan.parse("tp2:1d,sp")) == []


def test_layers_without_roles_are_said_to_be_priced_whole() -> None:
    model = describe_by_running(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), 1)
    assert "no layer of Sequential is divided by a role" in notes(model, Plan.parse("tp2"))[0]
    assert notes(model, Plan.parse("dp2")) == []
    named = describe_by_running(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), 1, {"0": "column", "2": "row"}
    )
    assert notes(named, Plan.parse("tp2")) == []


def test_words_of_an_estimate_name_what_they_count(capsys, tmp_path) -> None:
    import json

    from plait.cli import main

    path = tmp_path / "images.toml"
    path.write_text(
        "[model]\nname = 'resnet'\ndepth = 18\nnum_classes = 10\n[train]\nglobal_batch = 64\n"
    )
    words = ["estimate", str(path), "--plan", "dp8 precision:bf16", "--cluster", "v100-32gbx8"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "samples/s" in said and "a million samples" in said and "tokens/s" not in said
    assert "v100-32gb has no bf16" in said and "causal" not in said
    path.write_text(
        "[model]\nname = 'gpt'\nnum_hidden_layers = 4\nhidden_size = 256\n"
        "num_attention_heads = 4\nvocab_size = 256\n[data]\nseq_len = 2048\n"
    )
    words = ["estimate", str(path), "--plan", "pp2 mb4 precision:bf16", "--cluster", "h100x8"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert (
        said.count("bubble") == 1 and "with the causal half" in said and "has no bf16" not in said
    )
    main([*words, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert 0 < data["mfu_causal"] < data["mfu"] and data["unit"] == "tokens"


MADE: list[int] = []


def make() -> nn.Module:
    MADE.append(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.parametrize("verb", ["estimate", "plan"])
def test_a_command_describes_a_model_of_ones_own_once(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To find its roles takes seconds where it is deep."""
    config = tmp_path / "own.toml"
    config.write_text(f'[model]\npython = "{__name__}:make"\n[train]\nglobal_batch = 8\n')
    MADE.clear()
    assert main([verb, str(config), "--cluster", "h100x2"]) == 0, capsys.readouterr().err
    assert len(MADE) == 1
