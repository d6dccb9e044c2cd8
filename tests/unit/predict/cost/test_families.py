"""Every family's row against the family's own code: the same number of weights, from a config.json
and from the module.
"""

from __future__ import annotations

import pytest
import torch

from plait.predict.cost import describe
from plait.predict.cost.model.families import DEFAULTS, FAMILIES
from plait.predict.cost.model.operations import Attention

transformers = pytest.importorskip("transformers")

S = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 100,
}
PLAIN = {key: value for key, value in S.items() if key != "intermediate_size"}
KV = {**S, "num_key_value_heads": 2}
HEAD = {**KV, "head_dim": 32}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **{
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "n_group": 1,
    },
    **{
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
    },
    **{"qk_rope_head_dim": 8, "v_head_dim": 16},
}
NEO = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
CASES = {
    "gpt2": GPT2,
    "gpt2 untied": {**GPT2, "n_inner": 100, "tie_word_embeddings": False},
    "gpt_bigcode": GPT2,
    "gptj": {**GPT2, "rotary_dim": 8},
    "codegen": {**GPT2, "rotary_dim": 8},
    "gpt_neo": {**NEO, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": S,
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 100, "max_seq_len": 64},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100},
    "opt": {**PLAIN, "max_position_embeddings": 64, "ffn_dim": 160, "word_embed_proj_dim": 64},
    "opt projected": {
        **{**PLAIN, "max_position_embeddings": 64, "ffn_dim": 160},
        **{"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    },
    "falcon 7b": {**PLAIN, "multi_query": True, "parallel_attn": True, "bias": False},
    "falcon 40b": {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": False},
    "falcon rw": {
        **PLAIN,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "alibi": True,
    },
    "llama": KV,
    "llama biased": {**HEAD, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": KV,
    "mixtral": {**KV, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": KV,
    "qwen2_moe": {**KV, **MOE, "shared_expert_intermediate_size": 48},
    "qwen3": HEAD,
    "qwen3_moe": {**HEAD, **MOE},
    "deepseek_v2": {**S, **LATENT, "num_key_value_heads": 4},
    "deepseek_v3": {**S, **LATENT, "num_key_value_heads": 4, "attention_bias": True},
    "gemma": HEAD,
    "gemma2": HEAD,
    "gemma3_text": HEAD,
    "phi": S,
    "phi3": {**KV, "pad_token_id": 0},
    "phimoe": {**KV, "num_local_experts": 4},
    "starcoder2": {**KV, "tie_word_embeddings": True},
    "stablelm": {**KV, "use_qkv_bias": True},
    "olmo": S,
    "olmo2": KV,
    "olmoe": {**S, "num_experts": 4, "num_experts_per_tok": 2},
    "cohere": {**S, "use_qk_norm": True},
    "granite": S,
    "nemotron": KV,
    "persimmon": S,
    "bert": {**S, "max_position_embeddings": 64},
    "glm4": {**HEAD, "pad_token_id": 0},
    "glm4_moe": {
        **HEAD,
        **{
            k: v
            for k, v in LATENT.items()
            if k != "q_lora_rank" and "dim" not in k and k != "kv_lora_rank"
        },
    },
    "gpt_oss": {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        **HEAD,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
    },
    "exaone4": KV,
    "seed_oss": HEAD,
    "biogpt": {**S, "max_position_embeddings": 64},
    "cohere2": KV,
    "glm": {**HEAD, "pad_token_id": 0},
    "hunyuan_v1_dense": HEAD,
    "olmo3": KV,
    "roberta": {**S, "max_position_embeddings": 64, "type_vocab_size": 1},
    "smollm3": {**KV, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "xglm": {
        "d_model": 64,
        "num_layers": 2,
        "attention_heads": 4,
        "ffn_dim": 160,
        "vocab_size": 100,
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_weights_are_those_of_the_family(case):
    family = case.split()[0]
    keys = CASES[case]
    config = transformers.AutoConfig.for_model(family, **keys)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(param.numel() for param in model.parameters())
    pasted = describe(config.to_dict(), 32)
    assert pasted.parameters == weights == describe(model, 32).parameters
    if family in FAMILIES or family == "llama":  # and of what a person would write
        assert describe({"model_type": family, **keys}, 32).parameters == weights


@pytest.mark.parametrize("case", ["gpt2", "llama", "qwen3", "gemma2", "falcon 7b", "opt"])
def test_flops_are_two_for_each_weight_of_a_product_and_token(case):
    model = describe({"model_type": case.split()[0], **CASES[case]}, 32)
    tables = sum(
        op.parameters
        for block, _ in model.runs
        for op in block.operations
        if hasattr(op, "rows") and hasattr(op, "width")
    )
    small = sum(
        count
        * (
            sum(op.parameters for op in block.operations if hasattr(op, "statistics"))
            + _biases(block)
        )
        for block, count in model.runs
    )
    products = sum(block.parameters * count for block, count in model.runs) - tables - small
    attention = sum(
        count * op.flops(32) / 2
        for block, count in model.runs
        for op in block.operations
        if isinstance(op, Attention)
    )
    assert model.forward_flops == pytest.approx(32 * (2 * products + attention))


def _biases(block):
    return sum(op.outputs * op.copies for op in block.operations if getattr(op, "bias", False))


def test_a_model_that_also_sees_is_its_language_model():
    inner = {**HEAD, "model_type": "gemma3_text"}
    assert (
        describe({"model_type": "gemma3", "text_config": inner}, 32).parameters
        == describe(inner, 32).parameters
    )


def test_sizes_that_a_published_config_leaves_out_are_the_librarys():
    library = pytest.importorskip("transformers").Gemma3TextConfig()
    for key, value in DEFAULTS["gemma3_text"].items():
        assert getattr(library, key) == value
    inner = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    found = describe({"model_type": "gemma3", "text_config": inner}, 32)
    assert found.parameters == pytest.approx(3.88e9, rel=1e-3)
