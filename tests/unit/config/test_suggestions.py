"""The key that was meant by one that no section has: a part of a key, a word of other libraries."""

from __future__ import annotations

import pytest

import plait
from plait.config import MODELS, Config
from plait.config.sections import SCHEMAS
from plait.config.suggestions import SYNONYMS, likeness, likest, nearest_key
from plait.errors import ConfigError

LLAMA = {
    "name": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
MEANT = {
    "model.hiden": "hidden_size",
    "model.hidden": "hidden_size",
    "model.layer": "num_hidden_layers",
    "model.n_layrs": "num_hidden_layers",
    "model.head": "num_attention_heads",
    "model.vocab": "vocab_size",
    "model.theta": "rope_theta",
    "model.d_model": "hidden_size",
    "model.batchsize": "train.global_batch",
    "model.seqlen": "data.seq_len",
    "data.seqlen": "seq_len",
    "data.seq_length": "seq_len",
    "data.batch_size": "train.global_batch",
    "train.warmup": "warmup_steps",
    "train.clip": "clip_grad_norm",
    "train.gradient_clipping": "clip_grad_norm",
    "train.epochs": "steps",
    "train.learning_rate": "lr",
    "train.weight_decy": "weight_decay",
    "train.batchsize": "global_batch",
    "train.seqlen": "data.seq_len",
    "recovery.snapshots": "snapshot_every",
    "eval.interval": "every",
    "plan.parallel": "text",
    "federated.client": "clients",
}


def refused(path: str) -> str:
    section, _, key = path.partition(".")
    tables = {"model": dict(LLAMA)}
    tables.setdefault(section, {})[key] = 3
    with pytest.raises(ConfigError) as caught:
        Config.load(tables)
    return str(caught.value)


@pytest.mark.parametrize("path", MEANT)
def test_what_was_meant(path: str) -> None:
    assert f"unknown key {path}; did you mean '{MEANT[path]}'" in refused(path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("model.lr", "it belongs to [train]"),
        ("train.dropout", "it belongs to [model] or [adapter]"),
        ("train.log_every", "known: "),
        ("train.zzz", "known: "),
        ("cluster.gpus", "the name says how many: [cluster] name = 'h100x64'"),
    ],
)
def test_keys_that_are_near_to_none(path: str, words: str) -> None:
    assert f"unknown key {path}; {words}" in refused(path)


@pytest.mark.parametrize("path", ["model.hiden", "model.layer", "model.head", "model.seqlen"])
def test_the_planner_says_the_same_though_it_reads_more_keys(path: str) -> None:
    """It also reads `hidden_act`, which is nearer to `hiden` by letters alone."""
    model = {**LLAMA, path.partition(".")[2]: 3}
    with pytest.raises(ConfigError, match=f"unknown key {path}; did you mean '{MEANT[path]}'"):
        plait.choose({"model": model}, cluster="h100x8")


def test_every_synonym_leads_to_a_key() -> None:
    schemas = dict(SCHEMAS)
    of_models = {key for schema in MODELS.values() for key in schema.model_fields}
    for section, words in SYNONYMS.items():
        for word, meant in words.items():
            owner, _, key = meant.rpartition(".")
            known = of_models if section == "model" else schemas[section].model_fields
            assert " " in meant or key in (schemas[owner].model_fields if owner else known), word


def test_a_part_counts_as_much_as_a_whole_and_the_first_of_equals_wins() -> None:
    assert likeness("hiden", "hidden_size") == likeness("hiden", "num_hidden_layers") > 0.9
    assert likest("hiden", ["num_hidden_layers", "hidden_size", "hidden_act"]) == "hidden_size"
    assert likest("zzz", ["hidden_size"]) is None
    assert nearest_key("log", "zzz", ["to", "by"]) == "known: by, to"
