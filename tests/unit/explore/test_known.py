"""The known models have the sizes that their names promise."""

from __future__ import annotations

import pytest

from plait.explore.known import KNOWN
from plait.predict.cost import describe

BILLIONS = {
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 405.9,
    "mistral-7b": 7.24,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "deepseek-v3": 671,
    "qwen2.5-7b": 7.62,
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "gpt2": 0.124,
    "gpt2-xl": 1.56,
    "gpt3-175b": 174.6,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_has_its_published_size(name: str) -> None:
    model = describe(KNOWN[name].tables)
    assert model.parameters == pytest.approx(BILLIONS[name] * 1e9, rel=0.005)
    assert model.seq_len == KNOWN[name].seq_len
