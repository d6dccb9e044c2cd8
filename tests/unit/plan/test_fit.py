"""Whether a plan fits a world, a batch and a model."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import PlanError, WorldSizeError
from plait.plan import Plan, check_batch, check_config, check_model, check_restarts, check_world


def test_world_names_the_product_and_the_cure() -> None:
    check_world(Plan.parse("pp2 dp2 tp2"), 8)
    with pytest.raises(WorldSizeError) as caught:
        check_world(Plan.parse("pp2 dp2 tp2"), 4)
    assert str(caught.value) == (
        "plan 'pp2 tp2 dp2' needs 8 ranks (pp2 x dp2 x tp2) but 4 were started; start 8 ranks "
        "(--nproc 8) or change dp2 to dp1"
    )
    with pytest.raises(WorldSizeError, match=r"start 8 ranks \(--nproc 8\) or choose a plan for 6"):
        check_world(Plan.parse("tp8"), 6)
    with pytest.raises(
        WorldSizeError,
        match=r"needs 1 ranks \(one device\) but 2 were started; .* or change dp1 to dp2",
    ):
        check_world(Plan(), 2)


def test_batch_needs_a_sample_for_every_micro_batch() -> None:
    check_batch(Plan.parse("dp2 mb4"), 8)
    check_batch(
        Plan.parse("dp2 mb4"), 9
    )  # uneven shares are exact: the loss is a mean over the global count
    with pytest.raises(PlanError) as caught:
        check_batch(Plan.parse("dp2 mb4"), 6)
    assert str(caught.value) == (
        "plan 'dp2 mb4': global_batch 6 leaves some of its dp2 x mb4 = 8 micro-batches without a "
        "sample; "
        "use global_batch 8 or more, or mb3 or fewer"
    )
    with pytest.raises(PlanError, match=r"use global_batch 4 or more$"):
        check_batch(Plan.parse("dp4"), 3)


GPT: dict[str, Any] = {
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_size": 48,
    "intermediate_size": 192,
    "vocab_size": 256,
    "num_layers": 4,
    "num_local_experts": 8,
    "seq_len": 64,
}


@pytest.mark.parametrize(
    "text",
    [
        "dp1",
        "tp4",
        "tp4:2d",
        "tp2:1d,sp cp2",
        "cp4:ulysses",
        "tp2 cp2:ulysses",
        "ep8 dp8",
        "pp2:interleaved,v3",
    ],
)
def test_models_that_fit(text: str) -> None:
    check_model(Plan.parse(text), **GPT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp8", "plan 'tp8' does not fit the model in 2 ways:"),
        (
            "tp8",
            "tp8: num_attention_heads 12 must be a multiple of 8 (the tp ranks); the nearest are "
            "8 and 16",
        ),
        (
            "tp8",
            "tp8: num_key_value_heads 4 must be a multiple of 8 (the tp ranks); the least "
            "num_key_value_heads is 8",
        ),
        (
            "tp9:2d",
            "tp9:2d: vocab_size 256 must be a multiple of 3 (the side of the 2d grid); the "
            "nearest are 255 and 258",
        ),
        (
            "tp125:3d",
            "tp125:3d: hidden_size 48 must be a multiple of 5 (the side of the 3d grid); the "
            "nearest are 45 and 50",
        ),
        ("cp3", "plan 'cp3': cp3: seq_len 64 must be a multiple of 3; the nearest are 63 and 66"),
        (
            "tp4:1d,sp cp32",
            "cp32 x tp4: seq_len 64 must be a multiple of 128; the least seq_len is 128",
        ),
        (
            "tp4 cp2:ulysses",
            "cp2:ulysses: ulysses splits the heads, and 3 heads (num_attention_heads 12 over "
            "tp4) are no multiple of 2; "
            "write cp2:ring or choose a divisor of 3",
        ),
        (
            "pp8",
            "pp8: cuts the model into 8 stages, but its 4 layers with the input and the output "
            "layer are only 6 pieces; "
            "lower pp or v",
        ),
        ("ep3 dp3", "ep3: num_local_experts 8 must be a multiple of 3; the nearest are 6 and 9"),
    ],
)
def test_models_that_do_not_fit(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_model(Plan.parse(text), **GPT)
    assert message in str(caught.value)


def test_a_dense_model_has_no_experts() -> None:
    with pytest.raises(
        PlanError,
        match=r"ep2: the model has no experts to split \(num_local_experts 0\); leave ep2 out",
    ):
        check_model(Plan.parse("ep2 dp2"), num_local_experts=0)


def test_sizes_that_are_not_given_are_not_asked() -> None:
    check_model(Plan.parse("pp8 tp7 ep3 dp3 cp5:ulysses"))
    check_model(Plan.parse("tp5"), hidden_size=48)  # 1d keeps the hidden dim whole


def test_check_config_reads_model_keys() -> None:
    check_config(
        Plan.parse("tp2 pp2"),
        {"num_attention_heads": 4, "num_hidden_layers": 2, "rope_theta": 10000},
    )
    with pytest.raises(PlanError, match="cuts the model into 9 stages"):
        check_config(Plan.parse("pp9"), {"num_hidden_layers": 2})


@pytest.mark.parametrize("text", ["dp4:local,every8", "dp4:async-server,stale2"])
def test_ranks_that_do_not_step_together_can_be_started_again(text: str) -> None:
    check_restarts(Plan.parse(text), num_servers=3)


@pytest.mark.parametrize(
    ("text", "num_servers", "cure"),
    [
        ("dp4:zero1", None, "take dp4:local,everyH"),
        ("dp4:async-server,stale0", 1, "with K above 0"),
        ("dp4:async-server,stale2", None, "with num_servers below 4 the others can come back"),
        ("dp4:async-server,stale2", 4, "with num_servers below 4 the others can come back"),
    ],
)
def test_who_cannot_be_started_again_is_told_the_cure(
    text: str, num_servers: int | None, cure: str
) -> None:
    with pytest.raises(PlanError, match=cure):
        check_restarts(Plan.parse(text), num_servers)
