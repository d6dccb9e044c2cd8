"""Models whose own code computes parts in float32: right plans are called right, within a bound
that these parts imply.
"""

from __future__ import annotations

import re

import pytest
from benchmarks.census.cell import judge
from benchmarks.census.configs import tiny

pytest.importorskip("transformers")

FAMILIES = ("cohere", "cohere2", "cohere2_moe", "glm4_moe", "jamba", "mamba", "qwen3_next")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_a_right_plan_is_called_right(family: str) -> None:
    cell = judge("causal", tiny("causal", family), "dp2:zero3")
    assert cell.verdict == "equal", cell.reason
    bound = re.search(r"within (.*)$", cell.reason)
    assert bound is not None, "no part computes in a lower precision any more"
    assert 1e-10 < float(bound[1]) <= 1e-4
