"""The state of optimizers in an estimate, also of those that it does not know."""

from __future__ import annotations

from typing import Any

import pytest

from plait.predict.cost import estimate
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
