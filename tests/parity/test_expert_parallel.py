"""The parity table of mixtures of experts: every router and every axis, auxiliary losses included, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.harness import EXPERT_FAMILIES, TOLERANCE, check

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_routers_do_not_know_how_many_ranks_there_are(ranks: Run, family: str) -> None:
    for plan in ("dp1", "dp2:zero1 mb2", "cp2:ring dp2", "cp2:ulysses mb2"):
        outcome = check(ranks, f"{plan} precision:float64", family, 5)
        assert outcome.largest <= TOLERANCE, (plan, outcome)
