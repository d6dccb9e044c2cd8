"""Whose word counts on what the C library does with freed memory; that a rank keeps it: see
tests/fault/test_launch.py.
"""

from __future__ import annotations

import pytest

from plait.launcher.allocator import CHOICES, keep_freed_memory


@pytest.mark.parametrize("name", CHOICES)
def test_who_has_chosen_is_not_overruled(name: str) -> None:
    assert not keep_freed_memory({name: "1"})
