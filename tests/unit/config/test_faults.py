"""What is said to a config that is wrong: the key's path, the value, the nearest known key, all
faults at once.
"""

from __future__ import annotations

from typing import Any

import pytest

from plait.config import MODELS, Config
from plait.errors import ConfigError

GPT: dict[str, Any] = {
    "name": "gpt",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
LLAMA = {**GPT, "name": "llama"}
MLP = {
    "name": "mlp",
    "in_features": 64,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "out_features": 10,
}
RESNET = {"name": "resnet", "in_channels": 1, "num_classes": 10}


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return str(caught.value)


def without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "the section [model] is missing"),
        ({"model": 3}, "[model] must be a table of keys, not 3"),
        ({"model": GPT, "train": [1]}, "[train] must be a table of keys, not [1]"),
        ({"model": GPT, "trian": {}}, "unknown section [trian]; did you mean 'train'?"),
        ({"model": GPT, "lr": 1}, "unknown section [lr]; it is a key of [train]"),
        (
            {"model": GPT, "precision": "bf16"},
            "unknown section [precision]; the plan says it: [plan] text = 'dp1 precision:bf16'",
        ),
        (
            {"model": GPT, "train": {"restarts": 1}, "recovery": {"restarts": 2}},
            "train.restarts 1 and recovery.restarts 2 exclude each other",
        ),
        (
            {"model": GPT, "recovery": {"replan": "atuo"}},
            "recovery.replan 'atuo' is neither 'auto' nor 'never' nor a list of plans",
        ),
        (
            {"model": {}},
            "model.name is missing; known: mlp, gpt, llama, resnet, fno, hf (or python = "
            "'module:function')",
        ),
        ({"model": {"name": "gptt"}}, "model.name 'gptt' is unknown; did you mean 'gpt'?"),
        ({"model": {"name": ["gpt"]}}, "model.name ['gpt'] is unknown"),
        (
            {"model": {"name": "gpt", "python": "m:f"}},
            "model.name 'gpt' and model.python 'm:f' are two models; keep one",
        ),
        ({"model": without(GPT, "vocab_size")}, "model.vocab_size is missing"),
        ({"model": without(GPT, "hidden_size")}, "model.hidden_size is missing"),
        (
            {"model": {**GPT, "hiden_size": 3}},
            "unknown key model.hiden_size; did you mean 'hidden_size'?",
        ),
        (
            {"model": {**GPT, "rope_theta": 3.0}},
            "unknown key model.rope_theta; it is a key of llama",
        ),
        ({"model": {**MLP, "seq_len": 3}}, "unknown key model.seq_len; it belongs to [data]"),
        (
            {"model": {**GPT, "num_hidden_layers": "8"}},
            "model.num_hidden_layers = '8' is wrong: it must be a whole number",
        ),
        (
            {"model": {**GPT, "hidden_size": 32.0}},
            "model.hidden_size = 32.0 is wrong: it must be a whole number",
        ),
        (
            {"model": {**GPT, "hidden_size": True}},
            "model.hidden_size = True is wrong: it must be a whole number",
        ),
        (
            {"model": {**GPT, "hidden_size": 0}},
            "model.hidden_size = 0 is wrong: it must be 1 or more",
        ),
        (
            {"model": {**GPT, "dropout": 1.5}},
            "model.dropout = 1.5 is wrong: it must be less than 1",
        ),
        (
            {"model": {**GPT, "tie_word_embeddings": 1}},
            "model.tie_word_embeddings = 1 is wrong: it must be true or false",
        ),
        (
            {"model": {**RESNET, "depth": 19}},
            "model.depth = 19 is wrong: it must be one of 18, 34, 50, 101, 152",
        ),
        ({"model": {"name": "hf"}}, "model.config is missing"),
        (
            {"model": {"name": "hf", "config": 3}},
            "model.config = 3 is wrong: it must be a string or a table",
        ),
        ({"model": {"python": "m"}}, "model.python = 'm' is wrong: it must be 'module:function'"),
        ({"model": {"python": "m:f", "width": 3}}, "unknown key model.width"),
        ({"model": GPT, "data": {"name": "stdlib", "workers": 9999}}, "it must be 256 or less"),
        ({"model": GPT, "plan": {"shares": 3}}, "it must be a list of numbers above 0"),
        ({"model": GPT, "plan": {"counts": 3}}, "plan.counts = 3 is wrong: it must be a list"),
        ({"model": GPT, "train": {"no_decay": "norm"}}, "it must be a list of words"),
        ({"model": GPT, "eval": {"data": 3}}, "eval.data = 3 is wrong: it must be a table"),
        (
            {"model": GPT, "data": {"name": "stdlbi"}},
            "data.name = 'stdlbi' is wrong: it must be one of 'stdlib', 'text'",
        ),
        ({"model": GPT, "data": {"name": "stdlbi"}}, "did you mean 'stdlib'?"),
        (
            {"model": GPT, "data": {"name": "text", "files": "a"}},
            "data.files = 'a' is wrong: it must be a list of paths",
        ),
        (
            {"model": GPT, "data": {"name": "random", "sequence_len": 3}},
            "unknown key data.sequence_len; did you mean 'seq_len'?",
        ),
        (
            {"model": GPT, "data": {"name": "random", "seq_len": 0}},
            "data.seq_len = 0 is wrong: it must be 1 or more",
        ),
        (
            {"model": GPT, "data": {"name": "random", "global_batch": 3}},
            "unknown key data.global_batch; it belongs to [train]",
        ),
        (
            {"model": GPT, "train": {"optimizer": "adam"}},
            "one of 'adamw', 'sgd', 'muon' or 'module:function'; did you mean 'adamw'?",
        ),
        ({"model": GPT, "train": {"lr": 0}}, "train.lr = 0 is wrong: it must be more than 0"),
        (
            {"model": GPT, "train": {"lr": float("nan")}},
            "train.lr = nan is wrong: it must be a finite number",
        ),
        (
            {"model": GPT, "train": {"lr": "1e-3"}},
            "train.lr = '1e-3' is wrong: it must be a number",
        ),
        (
            {"model": GPT, "train": {"betas": [0.9]}},
            "train.betas = [0.9] is wrong: it must be a list of two numbers from 0 to below 1",
        ),
        (
            {"model": GPT, "train": {"betas": [0.9, 1]}},
            "train.betas = [0.9, 1] is wrong: it must be a list of two numbers",
        ),
        ({"model": GPT, "train": {"seed": -1}}, "train.seed = -1 is wrong: it must be 0 or more"),
        (
            {"model": GPT, "train": {"loss": "f"}},
            "train.loss = 'f' is wrong: it must be 'module:function'",
        ),
        (
            {"model": GPT, "train": {"clip_grad_norm": 0}},
            "train.clip_grad_norm = 0 is wrong: it must be more than 0",
        ),
        (
            {"model": GPT, "train": {"precision": "bf16"}},
            "unknown key train.precision; the plan says it: [plan] text",
        ),
        (
            {"model": GPT, "train": {"lerning_rate": 8}},
            "unknown key train.lerning_rate; did you mean 'lr'?",
        ),
        ({"model": GPT, "train": {"zzz": 8}}, "unknown key train.zzz; known: "),
        (
            {"model": GPT, "train": {"batch_size": 8}},
            "unknown key train.batch_size; did you mean 'global_batch'",
        ),
        (
            {"model": GPT, "train": {"hidden_size": 8}},
            "unknown key train.hidden_size; it belongs to [model]",
        ),
        ({"model": GPT, "plan": {"txt": "dp1"}}, "unknown key plan.txt; did you mean 'text'?"),
        ({"model": GPT, "plan": {"text": 3}}, "plan.text = 3 is wrong: it must be a string"),
        (
            {"model": GPT, "cluster": {"nam": "local"}},
            "unknown key cluster.nam; did you mean 'name'?",
        ),
        ({"model": GPT, "plan": {"text": ["x" * 99]}}, "x... is wrong: it must be a string"),
    ],
)
def test_single_faults(source: dict[str, Any], message: str) -> None:
    assert message in refused(source)
    assert len(refused(source).splitlines()) == 1 and refused(source).startswith("config: ")


def test_all_faults_of_all_sections_at_once() -> None:
    source = {
        "model": {**GPT, "hiden_size": 3, "num_attention_heads": "4"},
        "data": {"name": "stdlib", "seqlen": 4},
        "train": {"lr": "x", "stepz": 4},
        "plan": {"text": 1},
        "cluster": {"name": 1},
        "trian": {},
    }
    lines = refused(source).splitlines()
    assert lines[0] == "config:"
    for key in [
        "[trian]",
        "num_attention_heads",
        "hiden_size",
        "seqlen",
        "train.lr",
        "stepz",
        "plan.text",
        "cluster.name",
    ]:
        assert sum(key in line for line in lines) == 1, key
    assert len(lines) == 9


STDLIB = {"name": "stdlib"}
DIGITS = {"name": "digits"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"model": {**GPT, "hidden_size": 30}},
            "model.hidden_size 30 must be a multiple of num_attention_heads 4; the nearest are "
            "28 and 32",
        ),
        (
            {"model": {**LLAMA, "hidden_size": 12}},
            "model.hidden_size 12 over num_attention_heads 4 is an odd size of a head",
        ),
        (
            {"model": {**LLAMA, "head_dim": 7}},
            "model.head_dim 7 is odd; rotary positions turn pairs",
        ),
        (
            {"model": {**LLAMA, "num_key_value_heads": 3}},
            "model.num_attention_heads 4 must be a multiple of num_key_value_heads 3; the "
            "nearest are 3 and 6",
        ),
        (
            {"model": {**LLAMA, "num_key_value_heads": 8}},
            "must be a multiple of num_key_value_heads 8; the least is 8",
        ),
        (
            {"model": {**LLAMA, "num_experts_per_tok": 2}},
            "model.num_experts_per_tok 2 needs num_local_experts",
        ),
        (
            {"model": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 5}},
            "model.num_experts_per_tok 5 is more than num_local_experts 4",
        ),
        (
            {"model": {"name": "hf", "config": {"n_layer": 1}}},
            "model.config needs model_type when it is a table",
        ),
        ({"model": GPT, "data": {}}, "data.name is missing; known: stdlib, text, digits, random"),
        (
            {"model": GPT, "data": {"name": "random", "python": "m:f"}},
            "data.name 'random' and data.python 'm:f' are two sources",
        ),
        (
            {"model": GPT, "data": {"name": "text"}},
            "data.files is missing; data 'text' needs files = ['path', ...]",
        ),
        (
            {"model": GPT, "data": {"name": "stdlib", "files": ["a"]}},
            "data.files belongs to data 'text' and 'files', not to 'stdlib'",
        ),
        (
            {"model": MLP, "data": STDLIB},
            "data 'stdlib' is text, and model 'mlp' takes none; use a model of gpt, llama, hf",
        ),
        (
            {"model": {**GPT, "vocab_size": 255}, "data": STDLIB},
            "model.vocab_size 255 is too small: data 'stdlib' is bytes and needs vocab_size 256 "
            "or more",
        ),
        (
            {
                "model": {"name": "hf", "config": {"model_type": "gpt2", "vocab_size": 99}},
                "data": STDLIB,
            },
            "model.vocab_size 99 is too small",
        ),
        (
            {
                "model": {"name": "hf", "config": {"model_type": "gpt2", "vocab_size": 50257}},
                "data": STDLIB,
            },
            "set vocab_size = 256 in model.config, give tokens by data.python, or say "
            "data.tokenizer = 'bytes'",
        ),
        (
            {"model": GPT, "data": DIGITS},
            "data 'digits' is images, and model 'gpt' takes none; use mlp or resnet",
        ),
        (
            {"model": {**MLP, "in_features": 63}, "data": DIGITS},
            "model.in_features 63: data 'digits' needs in_features 64",
        ),
        (
            {"model": {**MLP, "out_features": 9}, "data": DIGITS},
            "model.out_features 9: data 'digits' needs out_features 10 or more",
        ),
        (
            {"model": {**RESNET, "in_channels": 3}, "data": DIGITS},
            "model.in_channels 3: data 'digits' needs in_channels 1",
        ),
        (
            {"model": {**RESNET, "num_classes": 9}, "data": DIGITS},
            "model.num_classes 9: data 'digits' needs num_classes 10 or more",
        ),
        (
            {"model": {"python": "m:f"}},
            "data.name 'random' needs a model by name, whose shapes it knows",
        ),
        (
            {"model": GPT, "data": {"name": "stdlib", "seq_len": 2048}},
            "data.seq_len 2048 is longer than model.max_position_embeddings 1024; shorten the "
            "one or raise the other",
        ),
        (
            {"model": GPT, "train": {"momentum": 0.9}},
            "train.momentum 0.9 belongs to optimizer 'sgd'; adamw has betas",
        ),
        (
            {"model": GPT, "train": {"optimizer": "sgd", "nesterov": True}},
            "train.nesterov needs momentum above 0",
        ),
        ({"model": GPT, "train": {"min_lr": 0.1}}, "train.min_lr 0.1 is above lr 0.001"),
        ({"model": GPT, "adapter": {"rank": 4}}, "adapter.rank 4 needs adapter.kind, 'lora' or"),
        ({"model": GPT, "recovery": {"replan": []}}, "recovery.replan [] is neither 'auto'"),
    ],
)
def test_keys_that_do_not_go_together(source: dict[str, Any], message: str) -> None:
    assert message in refused(source)
    assert len(refused(source).splitlines()) == 1


def test_broken_rules_come_together() -> None:
    source = {
        "model": {**GPT, "hidden_size": 30, "vocab_size": 9},
        "data": {"name": "stdlib", "seq_len": 4096},
    }
    assert len(refused(source).splitlines()) == 4


@pytest.mark.parametrize(
    "source",
    [
        {"model": MLP, "data": DIGITS},
        {"model": RESNET, "data": DIGITS},
        {"model": MLP},
        {"model": {**LLAMA, "num_key_value_heads": 1}, "data": STDLIB},
        {"model": {**LLAMA, "hidden_size": 30, "head_dim": 8}},
        {
            "model": {
                **LLAMA,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "num_shared_experts": 0,
            }
        },
        {"model": GPT, "train": {"optimizer": "sgd", "momentum": 0.9, "nesterov": True}},
        {"model": {"name": "hf", "config": "x/config.json"}, "data": STDLIB},
    ],
)
def test_good_configs_load(source: dict[str, Any]) -> None:
    Config.load(source)


def test_every_model_has_a_schema() -> None:
    assert list(MODELS) == ["mlp", "gpt", "llama", "resnet", "fno", "hf"]
