"""Right configurations, drawn from a seed, on which verify is silent."""

from __future__ import annotations

import pytest

from tests.helpers.pool import Pool
from tests.parity.planted.healthy import drawn, verdict


@pytest.mark.parametrize("number", range(4))
def test_verify_is_silent(rank_pool: Pool, number: int) -> None:
    entry = drawn(number)
    said = verdict(entry, rank_pool)
    assert said.kind == "silent", f"{entry.name} {entry.keys}\n{said.text}"


def test_what_is_drawn_depends_on_its_number_alone() -> None:
    assert drawn(7) == drawn(7)
    assert len({drawn(number).name for number in range(40)}) == 40
