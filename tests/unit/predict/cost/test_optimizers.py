"""The state of optimizers in an estimate, also of those that it does not know."""

from __future__ import annotations

from typing import Any

import pytest

from plait.predict.cost import estimate, matrices
from plait.predict.cost.model.tables import assumed

MODEL = {
    "name": "gpt",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
}


def state_bytes(optimizer: str) -> float:
    tables: dict[str, Any] = {"model": MODEL, "train": {"optimizer": optimizer}}
    return estimate(tables, "dp2:zero1", "a100-80gbx2").memory.optimizer


def test_muon_keeps_one_number_less_of_each_matrix_of_a_block() -> None:
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 64)
    assert state_bytes("adamw") - state_bytes("muon") == pytest.approx(4 * matrices / 2)


def test_an_optimizer_that_is_not_known_counts_as_adamw_and_is_named() -> None:
    assert state_bytes("mine:lion") == state_bytes("adamw")
    notes = assumed({"model": MODEL, "train": {"optimizer": "mine:lion"}}, 16, 8)
    assert any("'mine:lion' is not known" in note for note in notes)


def step(optimizer: str, plan: str, **keys: Any) -> Any:
    tables: dict[str, Any] = {
        "model": {**MODEL, **keys},
        "train": {"optimizer": optimizer, "global_batch": 8192},
    }
    return estimate(tables, plan, "a100-80gbx4096")


def test_the_products_of_muon_take_time_and_owners_share_them() -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    alone, shared = (
        step("muon", plan, **wide).step_seconds - step("adamw", plan, **wide).step_seconds
        for plan in ("dp2", "dp2:zero1")
    )
    assert alone > 0
    assert shared < alone


@pytest.mark.parametrize("plan", ["dp8:zero1", "dp64:zero3", "dp8:zero1 tp4", "tp8"])
def test_owners_count_as_even_among_very_many_ranks(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = step("muon", plan, num_hidden_layers=16).traffic["dp"]
    monkeypatch.setattr(matrices, "MOST_PLACES", 0)
    even = step("muon", plan, num_hidden_layers=16).traffic["dp"]
    assert even == pytest.approx(exact, rel=0.05)
