"""All planted faults but those of `test_mutations` and of the sample, one after the other."""

from __future__ import annotations

import pytest

from tests.helpers.pool import Pool
from tests.parity.planted.entry import Entry, judged
from tests.parity.planted.table import NEW, TRAINING
from tests.parity.test_planted import SAMPLE


@pytest.mark.parametrize("entry", [*NEW, *TRAINING], ids=lambda one: one.name)
def test_a_planted_fault_is_named(rank_pool: Pool, entry: Entry) -> None:
    if entry.name in SAMPLE:
        return
    found = judged(entry, rank_pool.run)
    assert not found.wrong, f"{found.wrong}\n{found.report.text()}"
