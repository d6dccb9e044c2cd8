"""Every error of the atlas is named, and no control raises an alarm."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from atlas.entries import Entry, entries, verdict

from plait.verify import Report
from plait.verify.outside.task import Trial
from plait.verify.outside.trial import on_ranks


def _judge(world: Any, trial: Trial) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return on_ranks(world, trial)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_the_error_is_named_and_the_control_is_silent(ranks, entry: Entry) -> None:
    found = verdict(entry, lambda trial, nproc: ranks(nproc, _judge, trial)[0])
    assert not found.wrong, found.wrong
