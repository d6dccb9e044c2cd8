"""Products of eight bits and fewer: which are rounded, what rounding costs, and who has them."""

from __future__ import annotations

import pytest

import plait
from plait.cluster.parse import PRECISIONS as OF_CLUSTERS
from plait.cluster.presets import PRESETS
from plait.errors import ClusterError
from plait.plan.precisions import PRECISIONS, PREDICTED
from plait.predict.cost.model.operations import Block, Matmul, Saved
from plait.predict.cost.time.kernels import is_rounded

CONFIG = {
    "model": {
        "name": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
        "vocab_size": 32000,
    },
    "data": {"seq_len": 4096},
    "train": {"global_batch": 64},
}


def seconds(precision: str, cluster: str = "b200x8", **model: object) -> float:
    config = {**CONFIG, "model": {**CONFIG["model"], **model}}
    plan = f"dp8:zero1 mb4 precision:{precision}"
    return plait.estimate(config, plan, cluster).step_seconds


def test_clusters_and_plans_know_the_same_words() -> None:
    assert set(OF_CLUSTERS) == set(PRECISIONS) and PREDICTED == ("fp8", "mxfp8", "nvfp4")
    for preset in PRESETS.values():
        assert preset.fp8 or not preset.microscaled
        assert preset.microscaled or not preset.nvfp4
        assert {*preset.peaks} <= set(OF_CLUSTERS)


def test_fewer_bits_are_faster_where_products_are_large() -> None:
    bf16, fp8, mxfp8, nvfp4 = (seconds(word) for word in ("bf16", *PREDICTED))
    assert bf16 > fp8 > mxfp8 > nvfp4
    assert bf16 / fp8 < 2.0 and bf16 / nvfp4 < 4.0


def test_rounding_costs_more_than_it_saves_where_products_are_small() -> None:
    small = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    assert seconds("fp8", **small) > seconds("bf16", **small)


def test_scales_and_rounded_copies_take_memory() -> None:
    totals = [
        plait.estimate(CONFIG, f"dp8:zero1 mb4 precision:{word}", "b200x8").memory.parameters
        for word in ("bf16", "nvfp4", "fp8", "mxfp8")
    ]
    assert totals == sorted(totals) and totals[2] == pytest.approx(1.5 * totals[0])


@pytest.mark.parametrize(
    ("block", "product", "rounds"),
    [
        ("layer", Matmul("qkv", 64, 64, "column"), True),
        ("layer", Matmul("up", 64, 64, "column", copies=8), True),
        ("layer", Matmul("router", 64, 8), False),
        ("layer", Matmul("scores", 64, 64, weightless=True), False),
        ("head", Matmul("head", 64, 64, "column"), False),
    ],
)
def test_only_linear_layers_of_blocks_are_rounded(
    block: str, product: Matmul, rounds: bool
) -> None:
    one = Block(block, (product,), Saved(), 64)
    assert is_rounded(one, product, "fp8") == rounds
    assert not is_rounded(one, product, "bf16")


def test_a_device_without_the_units_is_refused_by_name() -> None:
    with pytest.raises(ClusterError, match="a100-80gb: no peak is known for precision fp8"):
        seconds("fp8", "a100-80gbx8")
    with pytest.raises(ClusterError, match="h100: no peak is known for precision mxfp8"):
        seconds("mxfp8", "h100x8")


def test_the_search_chooses_in_the_precision_of_the_config() -> None:
    config = {**CONFIG, "plan": {"text": "precision:fp8"}}
    best = plait.choose(config, "h100x8", top=1)[0]
    assert best.plan.precision == "fp8"
