"""The door: keys, errors, and the direction in which things change."""

import sys

import pytest

import plait
from plait.errors import ClusterError, ConfigError, PlanError, WorldSizeError
from plait.predict.cost import Efficiency, Runtime
from tests.unit.predict.cost.shapes import GPT3, LLAMA_8B, MIXTRAL, config

KEYS = {
    *(
        "plan",
        "fits",
        "step_seconds",
        "tokens_per_second",
        "tokens_per_second_per_device",
        "tflops_per_device",
        "mfu",
    ),
    *("bubble_fraction", "memory", "traffic", "cost_per_million_tokens"),
}
PLAN = "tp8:1d,sp pp8:interleaved,v2 dp4:zero1 mb64 remat:selective precision:bf16"


def guess(plan, model=LLAMA_8B, cluster="h100x64", **keys):
    return plait.estimate(config(model, **keys), plan=plan, cluster=cluster)


def test_the_keys_of_the_contract():
    data = guess(PLAN, GPT3, "a100-80gbx256", global_batch=256).as_dict()
    assert set(data) >= KEYS
    assert set(data["memory"]) == {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "buffers",
        "total",
    }
    assert data["memory"]["total"] == pytest.approx(
        sum(v for k, v in data["memory"].items() if k != "total"), abs=4
    )
    assert set(data["traffic"]) == {"dp", "tp", "pp", "cp", "ep"}
    assert data["tokens_per_second"] == pytest.approx(256 * 2048 / data["step_seconds"])
    assert data["tokens_per_second_per_device"] == pytest.approx(data["tokens_per_second"] / 256)
    assert 0.3 < data["mfu"] < 0.7
    assert sum(data["breakdown_seconds"].values()) == pytest.approx(data["step_seconds"], rel=0.02)


def test_nothing_of_it_needs_torch():
    code = (
        "import plait, sys; plait.estimate; plait.choose; import plait.cli.plan; sys.exit('torch' "
        "in sys.modules)"
    )
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_compiling_and_wider_links_only_help():
    base = guess("tp8 dp8 mb1 precision:bf16").step_seconds
    assert guess("tp8 dp8 mb1 precision:bf16 compile").step_seconds < base
    fast = plait.estimate(
        config(LLAMA_8B), "tp8 dp8 mb1 precision:bf16", "h100x64", efficiency=Efficiency(link=1.0)
    )
    assert fast.step_seconds < base


def test_recomputation_trades_time_for_memory():
    none, selective, full = (
        guess(f"dp8:zero1 mb2 remat:{word} precision:bf16")
        for word in ("none", "selective", "full")
    )
    assert none.step_seconds < selective.step_seconds < full.step_seconds
    assert none.memory.total > selective.memory.total > full.memory.total


def test_zero_bubble_has_less_bubble_and_a_runtime_that_blocks_is_slower():
    plain = guess("pp4 dp2 mb8 precision:bf16")
    zero = guess("pp4:zb-h1 dp2 mb8 precision:bf16")
    assert zero.bubble_fraction < plain.bubble_fraction
    blocking = plait.estimate(
        config(LLAMA_8B),
        "pp4 dp2 mb8 precision:bf16",
        "h100x64",
        runtime=Runtime(overlap_sends=False),
    )
    assert blocking.step_seconds > plain.step_seconds


def test_tensor_parallel_over_the_node_boundary_is_dear():
    inside = guess("tp8 dp2 mb2 precision:bf16")
    outside = guess("tp16 mb2 precision:bf16", {**LLAMA_8B, "num_key_value_heads": 32})
    assert outside.breakdown.tensor > 1.5 * inside.breakdown.tensor


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"plan": "dp128"}, WorldSizeError, "needs 128 devices and h100x64 has 64"),
        ({"plan": "tp6:2d"}, PlanError, "square"),
        ({"cluster": "h10x8"}, ClusterError, "h100"),
        (
            {"config": {"model": {**LLAMA_8B, "hiden_size": 1}}},
            ConfigError,
            "did you mean 'hidden_size'",
        ),
        ({"config": {"model": LLAMA_8B, "trian": {}}}, ConfigError, "did you mean 'train'"),
        (
            {"config": {"model": LLAMA_8B, "train": {"global_bach": 3}}},
            ConfigError,
            "did you mean 'global_batch'",
        ),
        ({"config": {"model": {"name": "lama"}}}, ConfigError, "did you mean 'llama'"),
    ],
)
def test_bad_input(change, error, message):
    asked = {"config": config(LLAMA_8B), "plan": "dp8", "cluster": "h100x64", **change}
    with pytest.raises(error, match=message):
        plait.estimate(asked["config"], plan=asked["plan"], cluster=asked["cluster"])


def test_an_estimate_takes_plan_and_cluster_from_the_config():
    asked = {
        **config(LLAMA_8B),
        "plan": {"text": "dp8:zero3 precision:bf16"},
        "cluster": {"name": "h100x8"},
    }
    assert str(plait.estimate(asked).plan) == "dp8:zero3 precision:bf16"


def test_a_step_waits_for_the_busiest_experts():
    asked = config(MIXTRAL, seq_len=4096, global_batch=64)
    even, uneven, whole = (
        plait.estimate(
            asked,
            f"dp8:zero3 ep{ep} precision:bf16",
            "h200x8",
            runtime=Runtime(expert_imbalance=busy),
        )
        for ep, busy in ((8, 1.0), (8, 1.5), (1, 1.5))
    )
    assert uneven.step_seconds > 1.1 * even.step_seconds
    assert uneven.traffic["ep"] == pytest.approx(1.5 * even.traffic["ep"])
    assert (
        whole.breakdown.compute < uneven.breakdown.compute
    )  # undivided, nobody is busier than the others


def test_an_estimate_prints_as_one_line():
    config = {
        "model": {
            "name": "mlp",
            "in_features": 64,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "out_features": 8,
        },
        "train": {"global_batch": 8},
    }
    text = str(plait.estimate(config, "dp2", "h100x8"))
    assert text.startswith("dp2: ") and "fits" in text and len(text) < 120


def test_images_have_no_sequence_that_a_context_axis_could_divide():
    config = {
        "model": {"name": "resnet", "depth": 18, "num_classes": 10, "in_channels": 3},
        "train": {"global_batch": 8},
    }
    with pytest.raises(PlanError, match="no sequence that cp2"):
        plait.estimate(config, "cp2", "h100x8")


def test_rows_of_features_have_no_sequence_either():
    config = {
        "model": {
            "name": "mlp",
            "in_features": 64,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "out_features": 10,
        },
        "data": {"name": "digits"},
        "train": {"global_batch": 8},
    }
    with pytest.raises(PlanError, match="mlp has no sequence that cp2"):
        plait.estimate(config, "cp2", "h100x8")
