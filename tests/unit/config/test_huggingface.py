"""A pasted config.json: real files of the families load as they are, and what would be another
model is refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from plait.config import Config
from plait.errors import ConfigError

GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
    "vocab_size": 128256,
}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}


def keys(table: dict[str, Any]) -> dict[str, Any]:
    return Config.load({"model": table}).model.keys_for_factory()


def refused(table: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load({"model": table})
    return str(caught.value)


def test_gpt2() -> None:
    assert keys(GPT2) == {
        "name": "gpt",
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 50257,
        # the library's default for this family, which its files leave out
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "dropout": 0.1,
        "max_position_embeddings": 1024,
        "layer_norm_epsilon": 1e-5,
    }
    assert keys({**GPT2, "name": "gpt"}) == keys(GPT2)
    assert keys({**GPT2, "tie_word_embeddings": False})["tie_word_embeddings"] is False
    assert keys({**GPT2, "n_inner": 99})["intermediate_size"] == 99
    assert keys({**GPT2, "n_inner": None})["intermediate_size"] == 3072


def test_llama() -> None:
    assert keys(LLAMA) == {
        "name": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "dropout": 0.0,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    }
    assert keys({**LLAMA, "model_type": "mistral", "sliding_window": None}) == keys(LLAMA)
    assert keys({**LLAMA, "rope_theta": 500000}) == keys(LLAMA)
    assert keys({**LLAMA, "layer_types": ["full_attention"] * 32}) == keys(LLAMA)


def test_newer_files_keep_the_rotary_base_in_a_table() -> None:
    table = {
        key: value for key, value in LLAMA.items() if key not in ("rope_theta", "rope_scaling")
    }
    assert keys(
        {**table, "rope_parameters": {"rope_type": "default", "rope_theta": 500000}}
    ) == keys(LLAMA)
    assert keys({**LLAMA, "rope_scaling": {"type": "default"}}) == keys(LLAMA)


def test_mixtral() -> None:
    assert keys(MIXTRAL) == {**keys(LLAMA), "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {**LLAMA, "hidden_act": "gelu"},
            "model.hidden_act = 'gelu' would be another model: 'llama' implements 'silu' or "
            "'swish'",
        ),
        (
            {**LLAMA, "attention_bias": True},
            "model.attention_bias = True would be another model: 'llama' implements False",
        ),
        ({**LLAMA, "mlp_bias": True}, "model.mlp_bias = True would be another model"),
        (
            {**LLAMA, "attention_dropout": 0.1},
            "model.attention_dropout = 0.1 would be another model: 'llama' implements 0",
        ),
        (
            {**LLAMA, "sliding_window": 4096},
            "model.sliding_window = 4096 would be another model: 'llama' implements nothing else "
            "than null",
        ),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "model.rope_scaling of type 'llama3' is not implemented",
        ),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "yarn"}},
            "model.rope_parameters of type 'yarn' is not implemented",
        ),
        (
            {**LLAMA, "quantization_config": {"bits": 4}},
            "model.quantization_config = {'bits': 4} would be another model",
        ),
        (
            {**LLAMA, "layer_types": ["sliding_attention"]},
            "model.layer_types has 'sliding_attention', but model 'llama' attends fully",
        ),
        (
            {**MIXTRAL, "router_jitter_noise": 0.1},
            "model.router_jitter_noise = 0.1 would be another model",
        ),
        (
            {**MIXTRAL, "output_router_logits": True},
            "model.output_router_logits = True would be another model",
        ),
        (
            {**MIXTRAL, "num_experts": 4},
            "model.num_experts = 4 and model.num_local_experts = 8 are one thing; keep one",
        ),
        (
            {**GPT2, "activation_function": "gelu"},
            "'gpt' implements 'gelu_new' or 'gelu_pytorch_tanh'",
        ),
        (
            {**GPT2, "scale_attn_weights": False},
            "model.scale_attn_weights = False would be another model",
        ),
        (
            {**GPT2, "attn_pdrop": 0.2},
            "attn_pdrop 0.2, embd_pdrop 0.1, resid_pdrop 0.1 differ; make them equal",
        ),
        (
            {**GPT2, "hidden_size": 99},
            "model.n_embd = 768 and model.hidden_size = 99 are one thing; keep one",
        ),
        (
            {**GPT2, "name": "llama"},
            "model.model_type 'gpt2' is not what model 'llama' computes (llama, mistral, mixtral "
            "are)",
        ),
        (
            {**LLAMA, "name": "llama", "model_type": "qwen2"},
            'write name = "hf" with config = {model_type = ...}',
        ),
        (
            {**LLAMA, "model_type": "qwen2"},
            "model.name is missing, and model_type 'qwen2' is none that is written here",
        ),
        ({**LLAMA, "model_type": 3}, "model_type 3 is none that is written here"),
        ({**LLAMA, "qk_norm": True}, "unknown key model.qk_norm"),
    ],
)
def test_what_would_be_another_model_is_refused(table: dict[str, Any], message: str) -> None:
    assert message in refused(table)
