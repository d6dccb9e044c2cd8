"""Families of transformers that compute parts in float32: right plans of them get a yes."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config import load
from plait.verify import Report
from plait.verify.run import VerifyTask, in_world, problem_of

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 32,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MOE: dict[str, Any] = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": {"sliding_window": 4},
    "glm4": {},
    "glm4_moe": MOE,
    "dots1": MOE,
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 4,
        "mamba_d_conv": 2,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 2,
    },
}


def run_task(world: Any, task: VerifyTask) -> Report:
    return in_world(world, task)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_plan_of_a_family_with_float32_parts_is_equal(ranks, family: str) -> None:
    pytest.importorskip("transformers")
    config = load(
        {
            "model": {
                "name": "hf",
                "config": {"model_type": family, **SMALL, **FAMILIES[family]},
            },
            "data": {"name": "random", "seq_len": 8},
            "train": {"steps": 2, "global_batch": 4, "lr": 1e-3},
            "plan": {"text": "dp2"},
        }
    )
    task = VerifyTask(problem_of(config), "dp2 precision:float64", 2, None, ("sgd", "adamw"))
    report = ranks(2, run_task, task, plan="dp2")[0]
    assert report.ok, report.text()
