"""Planted faults, of which the quick ones here and the others with the long tests, are named."""

from __future__ import annotations

import pytest

from tests.helpers.pool import Pool
from tests.parity.planted.entry import judged
from tests.parity.planted.table import BY_NAME, ENTRIES

SAMPLE = (
    "decays twice",
    "sums in bf16",
    "clips each tensor",
    "targets of the next sample",
    "auxiliary loss of each rank",
    "gradients of keys stay",
    "weight gradients lost",
    "moments change places",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_fault_is_named(rank_pool: Pool, name: str) -> None:
    found = judged(BY_NAME[name], rank_pool.run)
    assert not found.wrong, f"{found.wrong}\n{found.report.text()}"


def test_there_are_a_hundred_of_them() -> None:
    assert len(BY_NAME) == len(ENTRIES) >= 130
    assert all(one.cause and one.axis for one in ENTRIES)


@pytest.mark.parametrize("name", [one.name for one in ENTRIES if one.how != "resume"])
def test_a_planted_fault_has_a_place(name: str) -> None:
    """A fault patches functions by name: a renamed one would plant nothing."""
    with BY_NAME[name].planted():
        pass
