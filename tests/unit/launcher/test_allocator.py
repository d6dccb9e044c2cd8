"""Whose word counts on what the C library does with freed memory; that a rank keeps it: see
tests/fault/test_launch.py.
"""

from __future__ import annotations

import os

import pytest

from plait.launcher.allocator import (
    CHOICES,
    NO_SMALL_LISTS,
    TUNABLES,
    keep_freed_memory,
    no_small_lists,
)


@pytest.mark.parametrize("name", CHOICES)
def test_who_has_chosen_is_not_overruled(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_of_a_user_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in CHOICES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    with no_small_lists():
        assert os.environ.get(TUNABLES) in (None, "1")
    assert os.environ[name] == "1"


def test_the_word_to_the_library_stays_in_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
    with no_small_lists():
        assert os.environ[TUNABLES] == NO_SMALL_LISTS
    assert TUNABLES not in os.environ
