"""Models of `transformers` with the dropout that their own configs have."""

from __future__ import annotations

from typing import Any

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "vocab_size": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64},
    "bert": {**SIZES, "intermediate_size": 64},
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "attention_dropout": 0.1},
    "biogpt": {**SIZES, "intermediate_size": 64, "activation_dropout": 0.1},
    "llama": {
        **SIZES,
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "attention_dropout": 0.1,
    },
}


def config_of_family(family: str) -> dict[str, Any]:
    """The config of a model of `transformers`, with the dropout of its own config."""
    return {
        "model": {"name": "hf", "config": {"model_type": family, **FAMILIES[family]}},
        "data": {"name": "random", "seq_len": 8},
        "train": {"global_batch": 4, "optimizer": "sgd", "lr": 0.1},
        "plan": {"text": "dp1"},
    }
