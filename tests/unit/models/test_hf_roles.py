"""A family's own plan is taken where its numbers divide; else what does not divide stays whole."""

from __future__ import annotations

import pytest

from plait.models import hf
from plait.models.hf_roles import table_of

SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}


def roles(**changed: int) -> dict[str, str]:
    config = {"model_type": "qwen2", **SIZES, **EVEN, **changed}
    return table_of(hf.make(config), 2).roles


def test_the_familys_plan_cuts_vocabulary_and_heads() -> None:
    assert roles()["model.lm_head"] == "head"


@pytest.mark.parametrize("changed", [{"vocab_size": 61}, {"num_key_value_heads": 1}])
def test_numbers_that_do_not_divide_are_left_whole(changed: dict[str, int]) -> None:
    table = roles(**changed)
    assert table["model"] == "whole"
    assert "column" in table["model.model.layers.*.mlp.up_proj"]
    if "vocab_size" in changed:
        assert table["model.lm_head"] == "replicated"
