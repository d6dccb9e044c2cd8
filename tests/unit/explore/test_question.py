"""A page may ask about models and presets, and about no file or code of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import ClusterError, ConfigError
from plait.explore.question import Opening, known_name, model_tables
from plait.predict.cost.model.known import KNOWN

OPENING = Opening(KNOWN["gpt2"].tables, "h100x8", "gpt2")


def test_a_name_a_pasted_json_and_a_pasted_toml_are_models() -> None:
    assert model_tables(" LLAMA3-8B ") == KNOWN["llama3-8b"].tables
    pasted = '{"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}'
    assert model_tables(pasted)["model"]["n_layer"] == 2
    text = '[model]\nmodel_type = "gpt2"\nn_layer = 3\n[data]\nseq_len = 16\n'
    assert model_tables(text)["data"] == {"seq_len": 16}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llama3-8", "did you mean 'llama3-8b'"),
        ('{"model_type": "gpt2",', "cannot be read as JSON"),
        ("[model\nname = 3", "not valid TOML"),
        ('{"model": {"python": "os:system"}}', "cannot name code"),
        ('[model]\nname = "hf"\nconfig = "/etc/passwd"', "cannot name files"),
        ('{"model": 3}', "must be a table"),
        ('{"model_type": "gpt2", "python": "os:system"}', "cannot name code"),
    ],
)
def test_a_text_that_is_no_model_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_tables(text)


def test_choices_lie_over_the_command_line() -> None:
    choices = known_name({"gpus": ["16"], "seq_len": ["512"], "batch": ["32"], "risk": [""]})
    tables = OPENING.tables_for(choices)
    assert tables["data"]["seq_len"] == 512 and tables["train"]["global_batch"] == 32
    assert OPENING.words_for(choices, ("cluster", "devices", "risk")) == [
        "--cluster=h100x8",
        "--gpus=16",
    ]
    assert OPENING.tables_for({}) is OPENING.tables


def test_an_unknown_choice_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cluster'"):
        known_name({"clutser": ["h100"]})


def test_a_cluster_file_is_the_command_lines_alone(tmp_path: Path) -> None:
    file = str(tmp_path / "mine.toml")
    with pytest.raises(ClusterError, match="on the command line"):
        OPENING.words_for({"cluster": [file]}, ("cluster",))
    named = Opening(OPENING.tables, file, "gpt2")
    assert named.words_for({"cluster": [file]}, ("cluster",)) == [f"--cluster={file}"]
