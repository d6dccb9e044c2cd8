"""Descriptions against the published sizes of models, and against plait's own models on the meta
device.
"""

import json

import pytest

import plait
from plait.errors import ModelError
from plait.predict.cost import describe
from plait.predict.cost.api import described, machine
from plait.predict.cost.frameworks import FSDP, PLAIT
from plait.predict.cost.memory.rank_memory import block_activations
from plait.predict.cost.model.operations import LARGE_LOGITS
from plait.predict.cost.sharding import Sharding
from tests.unit.predict.cost.shapes import DEEPSEEK_V3, GPT, GPT3, LLAMA_8B, MIXTRAL


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        (LLAMA_8B, 8.03, 8.03),
        (MIXTRAL, 46.70, 12.88),
        (DEEPSEEK_V3, 671.03, 37.55),
        (GPT3, 175.2, 175.2),
    ],
    ids=["llama-8b", "mixtral", "deepseek-v3", "gpt-3"],
)
def test_parameters_are_the_published_ones(model, total, active):
    described = describe(model, 2048)
    assert described.parameters / 1e9 == pytest.approx(total, rel=2e-3)
    assert described.active_parameters / 1e9 == pytest.approx(active, rel=5e-3)


def test_forward_flops_are_two_for_each_weight_and_token_plus_half_of_attention():
    described = describe({**GPT, "tie_word_embeddings": True, "max_position_embeddings": 64}, 64)
    hidden = 512
    layers = 8
    norms = layers * 4 * hidden + 2 * hidden
    biases = layers * (3 * hidden + hidden + 4 * hidden + hidden)
    weights = described.parameters - 64 * hidden - norms - biases
    attention = layers * 4 * 64 * hidden / 2
    assert described.forward_flops == pytest.approx(64 * (2 * weights + attention))


def test_a_pasted_config_and_its_aliases_describe_the_same(tmp_path):
    other = {
        "model_type": "gpt2",
        "n_layer": 8,
        "n_embd": 512,
        "n_head": 8,
        "vocab_size": 1024,
        "n_positions": 1024,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(other))
    own = describe({**GPT, "tie_word_embeddings": True}, 128)
    assert describe(other, 128).parameters == own.parameters
    assert describe({"name": "hf", "config": str(path)}, 128).parameters == own.parameters
    assert describe({"name": "hf", "config": other}, 128).runs == describe(other, 128).runs


def test_leading_dense_layers_and_experts_are_runs_of_their_own():
    names = [(block.name, count) for block, count in describe(DEEPSEEK_V3, 4096).runs]
    assert names == [("embedding", 1), ("layer", 3), ("moe", 58), ("head", 1)]


def test_a_missing_size_names_the_model_and_the_key():
    with pytest.raises(ModelError, match="'llama' needs the key 'hidden_size'"):
        describe({"name": "llama", "num_attention_heads": 8}, 128)


def test_models_without_a_sequence():
    mlp = describe(
        {
            "name": "mlp",
            "in_features": 10,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "out_features": 5,
        }
    )
    assert mlp.parameters == 10 * 32 + 32 + 2 * (32 * 32 + 32) + 32 * 5 + 5
    assert mlp.seq_len == 1
    resnet = describe({"name": "resnet", "depth": 18, "num_classes": 1000, "in_channels": 3})
    assert resnet.parameters == 11_689_512


def test_a_fused_loss_keeps_its_logits_once():
    keys = {**GPT, "num_hidden_layers": 1}
    plain = describe(keys, 128)
    fused = describe({**keys, "fused_cross_entropy": True}, 128)
    assert plain.parameters == fused.parameters
    shard = Sharding(seq_len=128)
    bytes_of = [
        block_activations(list(model.blocks())[-1], shard, ("bf16", False, "none"))
        for model in (plain, fused)
    ]
    assert (
        bytes_of[0] - bytes_of[1] == 128 * GPT["vocab_size"] * 12
    )  # in float32: as themselves, probabilities, gradients


def test_large_logits_of_plait_have_no_float32_copy():
    tables = {"model": {**GPT, "num_hidden_layers": 1}, "data": {"seq_len": 128}}
    heads = [list(described(tables, name).blocks())[-1] for name in (PLAIT, FSDP)]
    few = LARGE_LOGITS // (128 * GPT["vocab_size"])
    for batch, fewer in ((few, 0), (few + 1, 10)):
        shard = Sharding(samples=batch, seq_len=128)
        own, torchs = (block_activations(head, shard, ("bf16", False, "none")) for head in heads)
        assert torchs - own == fewer * batch * 128 * GPT["vocab_size"]


def test_a_compiled_loss_of_large_logits_moves_them_three_times():
    def seconds(**keys):
        tables = {
            "model": {**GPT, "num_hidden_layers": 1, **keys},
            "data": {"seq_len": 128},
            "train": {"global_batch": 256},
        }
        return plait.estimate(tables, "dp1 precision:bf16 compile", "h100x1").breakdown.compute

    moved = (15 - 3) * 256 * 128 * GPT["vocab_size"] * 2
    saved = seconds(fused_cross_entropy=False) - seconds()
    assert saved == pytest.approx(moved / machine("h100x1").streaming_rate, rel=1e-6)
