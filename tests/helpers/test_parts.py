"""Parts of the tests: every test is in one of them."""

from __future__ import annotations

import argparse

import pytest

from tests.conftest import part, part_of

NAMES = [f"tests/test_one.py::test_row[{number}]" for number in range(300)]


def test_every_test_is_in_one_part() -> None:
    parts = [part_of(NAMES, index, 3) for index in (1, 2, 3)]
    assert sorted(name for one in parts for name in one) == sorted(NAMES)
    assert all(70 < len(one) < 130 for one in parts)


def test_a_part_does_not_depend_on_the_others() -> None:
    """So a test that fails in a part can be run alone in it."""
    assert part_of(NAMES[:10], 2, 3) == part_of(NAMES, 2, 3) & set(NAMES[:10])


def test_words_are_read() -> None:
    assert part("2/3") == (2, 3)


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "a/b", "-1/3"])
def test_what_is_no_part_is_told(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"as 2/3: not '{text}'"):
        part(text)
