"""Every error of the atlas is named, and no control raises an alarm."""

from __future__ import annotations

import pytest
from atlas.entries import Entry, entries, verdict

from plait.verify.outside.trial import check
from tests.parity.test_atlas import judge_in_pool


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_the_error_is_named_and_the_control_is_silent(ranks, entry: Entry) -> None:
    if entry.missing:
        pytest.skip(f"not installed: {entry.missing}")
    if entry.wheels:  # the ranks of the pool have other versions loaded
        found = verdict(entry, check)
    else:
        found = verdict(entry, lambda trial, nproc: ranks(nproc, judge_in_pool, trial)[0])
    assert not found.wrong, found.wrong


def test_an_entry_is_real_where_it_names_wheels() -> None:
    found = entries()
    assert len({one.link for one in found}) == len(found)
    assert all(one.package for one in found if one.wheels)
