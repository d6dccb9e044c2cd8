"""Hugging Face models in stages, as they are: shared results are carried or computed anew, tied
weights summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.harness import TOLERANCE, check
from tests.parity.hugging_face import HUGGING_FACE

Run = Callable[..., list[Any]]
pytest.importorskip("transformers")


@pytest.mark.parametrize("plan", ["pp2:1f1b mb3", "pp3:1f1b mb3"])
@pytest.mark.parametrize("family", HUGGING_FACE)
def test_equals_one_device(ranks: Run, family: str, plan: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan",
    ["pp2:zbv mb3", "pp2:zb-h1 dp2:zero3 mb2", "pp2:interleaved,v2 dp2:zero1 mb2 remat:full"],
)
@pytest.mark.parametrize("family", ["hf-gpt2", "hf-llama-tied", "hf-t5"])
def test_composes(ranks: Run, family: str, plan: str) -> None:
    """Several stages on a rank too: there T5's shared embedding, called by encoder and decoder, has
    a copy a stage.
    """
    outcome = check(ranks, f"{plan} precision:float64", family)
    assert outcome.largest <= TOLERANCE, outcome
