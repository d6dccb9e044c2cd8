"""Models that tests share, in the keys of configs."""

GPT = {
    "name": "gpt",
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 1024,
}
GPT3 = {
    "name": "gpt",
    "num_hidden_layers": 96,
    "hidden_size": 12288,
    "num_attention_heads": 96,
    "vocab_size": 51200,
}
LLAMA_8B = {
    **{
        "name": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    **{"intermediate_size": 14336, "vocab_size": 128256},
}
MIXTRAL = {
    **{
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    **{
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
DEEPSEEK_V3 = {
    **{
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "vocab_size": 129280,
    },
    **{
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    },
    **{"n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}


def config(model, seq_len=2048, global_batch=64, **train):
    return {
        "model": model,
        "data": {"seq_len": seq_len},
        "train": {"global_batch": global_batch, **train},
    }
