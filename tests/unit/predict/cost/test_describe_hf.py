"""Models of the transformers library on the meta device: every parameter is described, dense and
not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.predict.cost import describe

transformers = pytest.importorskip("transformers")
SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        **EXPERTS,
        **LATENT,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    | {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_described(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    with torch.device("meta"):
        module = getattr(transformers, f"{family}ForCausalLM")(config)
    described = describe(module, 32)
    assert described.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert described.seq_len == 32
    assert any(block.flops(32) for block, _ in described.runs)
