"""`ep` over dp x cp x tp, as Megatron-Core folds experts over tensor ranks: priced, and not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

import plait
from plait.errors import NotAvailable, PlanError
from plait.plan import Plan, check_runnable
from plait.predict.cost import describe
from plait.predict.cost.memory.rank_memory import block_weights
from plait.predict.cost.model.operations import Matmul
from plait.predict.cost.model.shapes import products
from plait.predict.cost.sharding import sharding
from plait.predict.cost.time.messages import block_messages
from plait.predict.planner.export import to_megatron

MODEL = {
    "name": "llama",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}
"""Qwen3-235B-A22B, as Llama."""
FOLDED = Plan.parse("tp2:1d,sp pp8:interleaved,v4 dp16:zero1 ep32 mb128 precision:fp8")
CUT = replace(FOLDED, ep=16)
MOE = next(block for block, _ in describe(MODEL).runs if block.num_experts)


def test_all_of_tp_or_none_of_it() -> None:
    assert FOLDED.check().folds_experts and not CUT.check().folds_experts
    for text in ("tp2 dp2 ep4", "tp4:1d,sp dp2 ep4", "tp4:2d dp2 ep8", "tp2:1d,sp dp2 ep8"):
        with pytest.raises(PlanError, match="borrows its ranks"):
            Plan.parse(text).check()


def test_ranks_hold_and_multiply_as_much_in_whole_experts() -> None:
    folded, cut = (sharding(plan, 4096, 1.0) for plan in (FOLDED, CUT))
    assert block_weights(MOE, folded) == block_weights(MOE, cut)
    for op in MOE.operations:
        if isinstance(op, Matmul) and op.copies > 1:
            whole, half = products(op, folded), products(op, cut)
            assert (whole.outputs, whole.inputs) == (op.outputs, op.inputs)
            assert whole.copies == half.copies / 2
            works = [m.copies * m.rows * m.outputs * m.inputs for m in (whole, half)]
            assert works[0] == pytest.approx(works[1])


def test_their_tokens_travel_on_the_expert_axis_alone() -> None:
    sent = {
        ep: block_messages(MOE, sharding(plan, 4096, 1.0), "bf16")
        for ep, plan in ((32, FOLDED), (16, CUT))
    }
    folded, cut = ([m for m in sent[ep] if m.axis == "tp"] for ep in (32, 16))
    assert len(folded) == len(cut) - 4  # an operand and a result of experts, there and back
    exchanges = [m for m in sent[32] if m.axis == "ep"]
    assert [(m.size, m.stride) for m in exchanges] == [(32, 1)] * 2
    assert [m.payload_bytes for m in exchanges] == [
        m.payload_bytes for m in sent[16] if m.axis == "ep"
    ]


def test_a_published_run_is_predicted_and_folding_is_faster() -> None:
    """Megatron-Bridge 25.11, Qwen3-235B-A22B on 256 H100 in eight bits: 1,575 tokens a second and
    device. The row names no batch, on which 1 % depends.
    """
    asked = {"model": MODEL, "data": {"seq_len": 4096}, "train": {"global_batch": 2048}}
    guess = plait.estimate(asked, FOLDED, "h100x256", framework="megatron-core")
    beside = plait.estimate(asked, CUT, "h100x256", framework="megatron-core")
    assert guess.tokens_per_second / 256 == pytest.approx(1575, rel=0.22)
    assert guess.step_seconds < 0.96 * beside.step_seconds


def test_it_is_not_run_and_plait_does_not_predict_its_own() -> None:
    with pytest.raises(NotAvailable, match=r"ep4 over dp x cp x tp can be predicted .* take ep2"):
        check_runnable(Plan.parse("tp2:1d,sp dp2 ep4"))
    asked = {"model": MODEL, "data": {"seq_len": 4096}, "train": {"global_batch": 2048}}
    for name in ("plait", "nanotron"):
        with pytest.raises(PlanError, match=f"{name} takes the ranks of experts from dp16 x cp1"):
            plait.estimate(asked, FOLDED, "h100x256", framework=name)


def test_it_is_searched_and_exported_where_it_can_be_run() -> None:
    asked = {"model": MODEL, "data": {"seq_len": 4096}, "train": {"global_batch": 2048}}
    fix = "tp2:1d,sp pp8 dp16 ep32"
    plans = plait.choose(asked, "h100x256", framework="megatron-core", fix=fix)
    assert plans and all(one.plan.folds_experts for one in plans)
    words = to_megatron(plans[0].plan, 2048).text
    assert "--expert-model-parallel-size 32 --expert-tensor-parallel-size 1" in words
    with pytest.raises(PlanError, match="no plan"):
        plait.choose(asked, "h100x256", fix=fix)
