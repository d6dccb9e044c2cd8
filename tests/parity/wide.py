"""Families for grids of eight, sixteen and nine ranks, and Hugging Face models beside those of the
main table.
"""

from __future__ import annotations

from tests.parity.families import TINY, Family

# Heads, features and vocabulary that 8 ranks of a line divide too.
WIDE = {
    "wide-mlp": Family(
        "mlp",
        {"in_features": 24, "hidden_size": 16, "num_hidden_layers": 4, "out_features": 5},
        (24,),
        5,
    ),
    "wide-gpt": Family(
        "gpt",
        {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 8,
            "intermediate_size": 40,
            "vocab_size": 48,
            "max_position_embeddings": 17,
        },
        (9,),
        48,
        tokens=True,
    ),
}
# Sizes that grids of 3 x 3 divide.
WIDE |= {
    "three-mlp": Family(
        "mlp",
        {"in_features": 21, "hidden_size": 18, "num_hidden_layers": 4, "out_features": 5},
        (21,),
        5,
    ),
    "three-gpt": Family(
        "gpt",
        {
            "num_hidden_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 6,
            "intermediate_size": 36,
            "vocab_size": 45,
            "max_position_embeddings": 17,
        },
        (8,),
        45,
        tokens=True,
    ),
}

WINDOW = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 3,
    "attention_dropout": 0.0,
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MORE_HUGGING_FACE = {  # each by the plan for tensor parallelism that its config has
    "hf-mistral": {**TINY, **WINDOW, "model_type": "mistral"},
    "hf-gemma": {
        **TINY,
        **TOKENS,
        "model_type": "gemma",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
    },
    "hf-gemma2": {
        **TINY,
        **TOKENS,
        **WINDOW,
        "model_type": "gemma2",
        "head_dim": 6,
        "query_pre_attn_scalar": 6,
    },
    "hf-gemma3": {
        **TINY,
        **TOKENS,
        **WINDOW,
        "model_type": "gemma3_text",
        "head_dim": 6,
        "query_pre_attn_scalar": 6,
    },
    "hf-qwen3": {
        **TINY,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
    },
    "hf-gpt-neox": {**TINY, **TOKENS, "model_type": "gpt_neox", "num_attention_heads": 4},
}
MORE_SPLIT = {
    f"more-{name}": Family(
        "hf", {"config": config}, (8,), int(str(config["vocab_size"])), tokens=True
    )
    for name, config in MORE_HUGGING_FACE.items()
}
WIDE |= MORE_SPLIT
