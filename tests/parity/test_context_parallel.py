"""The parity table of the context axis: ring and Ulysses, alone and with data parallelism, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.harness import TOLERANCE, check

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("family", ["long-llama", "long-gpt"])
@pytest.mark.parametrize("plan", ["cp2:ring", "cp4:ring mb2", "cp2:ulysses mb2", "cp4:ulysses"])
def test_equals_one_device(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, 5)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan",
    [
        "cp2:ring dp2:zero1 mb2", "cp2:ulysses dp2:zero2 mb2", "cp2:ring dp2:zero3", "cp2:ulysses dp2:ring",
        "cp2:ring dp2:server", "cp2:ring dp2:zero3,replicate2",
    ],
)  # fmt: skip
def test_shards_over_data_and_context(ranks: Run, plan: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", "long-llama", 5, clip_grad_norm=0.05)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("family", ["long-llama", "long-gpt"])
@pytest.mark.parametrize(
    "plan",
    ["cp2:ring tp2 dp2:zero1", "cp2:ring tp2:1d,sp", "cp2:ulysses tp2:1d,sp", "cp2:ring tp4:2d", "pp2:1f1b cp2:ring mb2"],
)
def test_composes(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, 5)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["cp2:ring mb2", "cp2:ulysses mb2", "cp2:ring dp2:zero3 mb2"])
@pytest.mark.parametrize("remat", ["selective", "full"])
def test_recomputes(ranks: Run, plan: str, remat: str) -> None:
    outcome = check(ranks, f"{plan} remat:{remat} precision:float64", "long-llama", 5)
    assert outcome.largest <= TOLERANCE, outcome
