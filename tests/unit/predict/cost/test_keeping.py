"""`keep_gathered` in an estimate: bytes, memory and time by hand, and the planner's choice."""

from __future__ import annotations

from typing import Any

import pytest

import plait
from plait.cluster import Cluster
from plait.errors import PlanError

MODEL = {
    "name": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 1000,
}
LAYER = 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024
RANKS = 8


def estimate(keep: Any, text: str, cluster: str = "h100x8", **more: Any) -> Any:
    tables = {
        "model": MODEL,
        "data": {"seq_len": 512},
        "train": {"global_batch": 64},
        "plan": {"keep_gathered": keep, **more},
    }
    return plait.estimate(tables, text, cluster)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("keep", [1, (0, 5), 8], ids=str)
def test_a_kept_layer_is_gathered_once_and_lies_whole(keep: Any, micro_batches: int) -> None:
    text = f"dp{RANKS}:zero3 mb{micro_batches} precision:bf16"
    plain, kept = estimate(None, text), estimate(keep, text)
    layers = keep if isinstance(keep, int) else len(keep)
    saved = (2 * micro_batches - 1) * layers * LAYER * 2 * (RANKS - 1) / RANKS
    assert plain.traffic["dp"] - kept.traffic["dp"] == pytest.approx(saved, rel=1e-12)
    assert kept.memory.buffers - plain.memory.buffers == layers * LAYER * 2
    assert kept.memory.total - plain.memory.total == layers * LAYER * 2
    assert kept.step_seconds < plain.step_seconds
    assert len(kept.keep_gathered or ()) == layers
    assert kept.as_dict()["keep_gathered"] == list(kept.keep_gathered or ())
    assert plain.keep_gathered is None
    assert "keep_gathered" not in plain.as_dict()


def test_of_one_micro_batch_a_third_of_the_bytes_of_a_layer_is_saved() -> None:
    text = f"dp{RANKS}:zero3 precision:float32"
    plain, kept = estimate(None, text), estimate(8, text)
    whole = 3 * 8 * LAYER * 4 * (RANKS - 1) / RANKS
    assert plain.traffic["dp"] - kept.traffic["dp"] == pytest.approx(whole / 3, rel=1e-12)


def cluster_with(limit: float, plan: str, tmp_path: Any) -> str:
    """A file of eight devices on which a plan has room for so many bytes."""
    path = tmp_path / "room.toml"
    text = 'count = 8\n[device]\npreset = "h100"\nmemory_gb = {!r}\n'
    path.write_text(text.format(80.0))
    size = Cluster.parse(str(path)).device.memory_bytes
    outside = size - estimate(None, plan, str(path)).memory_limit
    path.write_text(text.format(80.0 * (limit + outside) / size))
    return str(path)


@pytest.mark.parametrize("layers", [0, 1, 3, 8])
def test_auto_keeps_as_many_as_fit(layers: int, tmp_path: Any) -> None:
    text = "dp8:zero3 mb2 precision:bf16"
    least = estimate(None, text).memory.total
    room = cluster_with(least + (layers + 0.5) * LAYER * 2, text, tmp_path)
    chosen = estimate("auto", text, room)
    assert chosen.fits
    assert chosen.keep_gathered == tuple(range(8 - layers, 8))
    by_hand = estimate(layers, text, room)
    assert chosen.step_seconds == by_hand.step_seconds
    assert chosen.memory == by_hand.memory
    if layers < 8:
        assert not estimate(layers + 1, text, room).fits


def test_auto_fills_each_rank_of_a_pipeline(tmp_path: Any) -> None:
    text = "pp2:1f1b dp4:zero3 mb4 precision:bf16"
    first, last = (one.total for one in estimate(None, text).stage_memory)
    assert first != last
    room = cluster_with(max(first, last) + 1.5 * LAYER * 2, text, tmp_path)
    chosen = estimate("auto", text, room)
    assert chosen.fits
    kept = set(chosen.keep_gathered or ())
    assert kept & {0, 1, 2, 3} and kept & {4, 5, 6, 7}
    assert all(memory.total <= chosen.memory_limit for memory in chosen.stage_memory)


def test_auto_keeps_nothing_where_nothing_is_gathered_or_nothing_fits(tmp_path: Any) -> None:
    assert estimate("auto", "dp8:zero1").keep_gathered == ()
    assert estimate("auto", "dp1:zero3").keep_gathered == ()
    text = "dp8:zero3 precision:bf16"
    small = cluster_with(estimate(None, text).memory.total / 2, text, tmp_path)
    chosen = estimate("auto", text, small)
    assert chosen.keep_gathered == ()
    assert not chosen.fits


def test_it_goes_with_blocks_that_recompute() -> None:
    text = "dp8:zero3 mb2 precision:bf16 remat:auto"
    words = ("full", "none") * 4
    found = estimate(3, text, remat=words)
    plain = estimate(None, text, remat=words)
    assert found.remat == plain.remat == words
    assert found.keep_gathered == (5, 6, 7)
    assert found.memory.total - plain.memory.total == 3 * LAYER * 2


def test_an_estimate_of_whole_layers_is_refused() -> None:
    with pytest.raises(PlanError, match="under dp8:zero2 layers are whole; take dp8:zero3"):
        estimate(2, "dp8:zero2")
    with pytest.raises(PlanError, match="the model has 8 blocks; give 0 to 8"):
        estimate(9, "dp8:zero3")


def test_a_search_prices_blocks_that_are_named() -> None:
    tables = {
        "model": MODEL,
        "data": {"seq_len": 512},
        "train": {"global_batch": 64},
        "plan": {"keep_gathered": 8},
    }
    first = plait.choose(tables, "h100x8", fix="dp8:zero3")[0]
    assert first.keep_gathered == tuple(range(8))
    tables["plan"] = {"keep_gathered": "auto"}
    filled = plait.choose(tables, "h100x8", fix="dp8:zero3")[0]
    assert filled.keep_gathered == tuple(range(8))  # all fit
    tables["plan"] = {"keep_gathered": 0}
    assert not plait.choose(tables, "h100x8", fix="dp8:zero3")[0].keep_gathered
