"""A sample of the atlas: its errors are named, and its controls raise no alarm."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from atlas.entries import Entry, entries, verdict

from plait.verify import Report
from plait.verify.outside.task import Trial
from plait.verify.outside.trial import on_ranks

SAMPLE = ("torchtitan-649", "NeMo-RL-3788", "torchtitan-2387")


def judge_in_pool(world: Any, trial: Trial) -> Report:
    """The report of ranks that are there already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return on_ranks(world, trial)


@pytest.mark.parametrize(
    "entry", [one for one in entries() if one.name in SAMPLE], ids=lambda entry: entry.name
)
def test_the_error_is_named_and_the_control_is_silent(ranks, entry: Entry) -> None:
    found = verdict(entry, lambda trial, nproc: ranks(nproc, judge_in_pool, trial)[0])
    assert not found.wrong, found.wrong
