"""What a config may say to `plan` and `estimate`: whatever cannot be is refused in words, before
any number.
"""

from __future__ import annotations

import json

import pytest

import plait
from plait.config import Config
from plait.errors import ConfigError, ModelError, PlaitError, PlanError
from plait.plan import Plan
from plait.predict.cost.model.tables import (
    assumed,
    config_tables,
    global_batch,
    read_config,
    with_lengths,
)
from tests.unit.predict.cost.shapes import GPT, LLAMA_8B, config

ABSURD = ["0", "-1", "abc", "1.5", "true", "nan", "inf", "1e30", "[]", '""', "{}"]
SIZES = [
    "model.hidden_size",
    "model.num_hidden_layers",
    "model.num_attention_heads",
    "model.vocab_size",
]
SIZES += ["data.seq_len", "train.global_batch", "train.optimizer", "cluster.name"]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.toml"
    sizes = "\n".join(f"{key} = {value!r}" for key, value in GPT.items())
    file.write_text(f"[model]\n{sizes}\n[data]\nseq_len = 64\n[train]\nglobal_batch = 8\n")
    return file


@pytest.mark.parametrize("key", [*SIZES, "model.n_embd", "model.head_dim"])
@pytest.mark.parametrize("value", ABSURD)
def test_an_absurd_value_is_an_error_of_the_config(path, key, value):
    if key == "model.head_dim" and value == "0":
        return  # as if it were left out
    if key == "cluster.name" and value[0] not in "01-n[{t":
        return
    with pytest.raises(PlaitError) as error:
        plait.estimate(
            read_config(path, [f"{key}={value}"]),
            "dp2",
            None if key == "cluster.name" else "h100x2",
        )
    assert key.rpartition(".")[2] in str(error.value)


@pytest.mark.parametrize("value", ABSURD)
def test_so_is_one_of_a_pasted_config(value):
    table = {
        "model_type": "mistral",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    wrong = (
        json.loads(value)
        if value[0] in '"[{' or value in ("true", "0", "-1", "1.5", "1e30")
        else float("nan")
    )
    with pytest.raises(ModelError, match="num_hidden_layers"):
        plait.estimate({"model": {**table, "num_hidden_layers": wrong}}, "dp1", "h100x1")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({**GPT, "num_attention_heads": 7}, "multiple of num_attention_heads 7"),
        ({**LLAMA_8B, "num_key_value_heads": 5}, "multiple of num_key_value_heads 5"),
        (
            {
                "model_type": "mistral",
                **{k: v for k, v in LLAMA_8B.items() if k != "name"},
                "num_key_value_heads": 5,
            },
            "of .* 5",
        ),
        ({k: v for k, v in GPT.items() if k != "name"}, "model.name is missing"),
        ({"name": "hf", "config": "nowhere/config.json"}, "nowhere/config.json"),
        (
            {
                "model_type": "t5",
                "d_model": 8,
                "num_heads": 2,
                "num_layers": 2,
                "is_encoder_decoder": True,
            },
            "encoder",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "model",
)
def test_what_does_not_fit_together_is_refused(model, said):
    with pytest.raises(PlaitError, match=said):
        plait.estimate({"model": model}, "dp1", "h100x1")


def test_a_batch_smaller_than_the_plan_is_refused():
    with pytest.raises(PlanError, match="use global_batch 128"):
        plait.estimate(config(GPT, global_batch=64), "dp8 mb16", "h100x8")


def test_every_fault_is_said_at_once():
    with pytest.raises(ConfigError) as error:
        config_tables(
            {"model": {**GPT, "hiden_size": 1}, "train": {"global_batch": 0}, "trian": {}}
        )
    assert all(word in str(error.value) for word in ("hidden_size", "global_batch", "[trian]"))


def test_choosing_and_estimating_assume_the_same_batch():
    open_config = {"model": GPT, "data": {"seq_len": 64}}
    best = plait.choose(open_config, "h100x8")[0]
    assert plait.estimate(open_config, best.plan, "h100x8").step_seconds == best.step_seconds
    assert (
        global_batch({}, 2) == 16
        and global_batch({}, 8) == 32
        and global_batch({}, 8, Plan.parse("dp8 mb16")) == 128
    )
    assert global_batch({"train": {"global_batch": 5}}, 8) == 5


def test_a_length_that_is_left_open_is_that_of_training_and_is_said():
    assert with_lengths({"model": GPT, "data": {}})["data"]["seq_len"] == 128
    assert (
        with_lengths({"model": {**GPT, "max_position_embeddings": 64}, "data": {}})["data"][
            "seq_len"
        ]
        == 64
    )
    assert "data" not in with_lengths({"model": GPT})
    said = assumed({"model": {"model_type": "dbrx"}}, 16, 2048)
    assert ["global_batch" in said[0], "2048 tokens" in said[1], "dbrx" in said[2]] == [True] * 3
    assert assumed(config(LLAMA_8B), 64, 2048) == []


@pytest.mark.parametrize("named", [True, False])
def test_a_family_without_an_entry_is_said_where_the_library_makes_the_model(tmp_path, named):
    table = {**LLAMA_8B, "model_type": "dbrx"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(table))
    model = {"name": "hf", "config": str(file) if named else table}
    (said,) = assumed(config(model), 64, 2048)
    assert "'dbrx' has no entry here" in said and "counted wrong" in said
    assert assumed(config({"name": "hf", "config": {"model_type": "llama"}}), 64, 2048) == []


def test_parts_that_are_not_described_are_said():
    table = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    (said,) = assumed(config({"name": "hf", "config": table}), 64, 2048)
    assert "'gemma3' has parts beside its text_config" in said


@pytest.mark.parametrize(
    "table",
    [
        {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500},
        {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        {"model_type": "t5", "d_model": 64, "is_encoder_decoder": True},
    ],
)
def test_a_model_without_formulae_is_refused_with_the_cure(table):
    with pytest.raises(ModelError, match=r"no formulae here.*python = 'module:function'"):
        plait.estimate(table, plan="dp1", cluster="h100x1")


def test_an_override_may_reach_into_a_table(tmp_path):
    file = tmp_path / "hf.toml"
    inner = (
        '{model_type = "llama", hidden_size = 64, num_attention_heads = 4, num_hidden_layers = 2, '
        "vocab_size = 100}"
    )
    file.write_text(f'[model]\nname = "hf"\nconfig = {inner}\n')
    assert (
        read_config(file, ["model.config.num_hidden_layers=5"])["model"]["config"][
            "num_hidden_layers"
        ]
        == 5
    )
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        read_config(file, ["steps"])


PASTED = {
    "gpt": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "summary_type": "cls_index",
        "vocab_size": 256,
    },
    "llama": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "rope_theta": 1e6,
        "sliding_window": None,
        "vocab_size": 256,
    },
}


@pytest.mark.parametrize("name", PASTED)
def test_a_pasted_config_beside_a_name_is_predicted_as_it_is_trained(name):
    data = {"name": "random", "seq_len": 16}
    tables = {"model": {"name": name, **PASTED[name]}, "data": data}
    guess = plait.estimate(tables, plan="dp2", cluster="h100x2")
    trained = plait.estimate(Config.load(tables).as_dict(), plan="dp2", cluster="h100x2")
    assert guess.memory == trained.memory


def test_an_unknown_key_beside_a_pasted_config_is_refused_with_each_known_key_once():
    tables = {"model": {"name": "llama", **PASTED["llama"], "zzz": 1}}
    with pytest.raises(ConfigError, match=r"unknown key model\.zzz; known: ") as caught:
        config_tables(tables)
    known = str(caught.value).partition("known: ")[2].split(", ")
    assert len(known) == len(set(known))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"adapter": {"rank": 4}}, "adapter.rank 4 needs adapter.kind"),
        ({"recovery": {"replan": "atuo"}}, "recovery.replan 'atuo' is neither 'auto' nor 'never'"),
    ],
)
def test_rules_of_adapters_and_recovery_hold_as_for_train(section, said):
    with pytest.raises(ConfigError, match=said):
        config_tables({"model": GPT, **section})
