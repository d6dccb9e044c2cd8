"""`plait estimate` prices what `plait train` would refuse, and says so."""

from __future__ import annotations

import pytest

from plait.cli.estimate import notes
from plait.plan import Plan
from plait.predict.cost import describe

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
