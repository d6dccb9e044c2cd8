"""Patterns of names: a star is one name between dots, and everything else is itself."""

from __future__ import annotations

import pytest

from plait.patterns import expression, matches


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("blocks.*", "blocks.12", True),
        ("blocks.*", "blocks.12.norm", False),
        ("blocks.*.norm", "blocks.12.norm", True),
        ("*", "head", True),
        ("*", "", False),
        ("a.b", "a.b", True),
        ("a.b", "axb", False),
        ("a[0]", "a0", False),
        ("layer*", "layer7", True),
        ("layer*", "layer", False),
    ],
)
def test_a_star_is_one_name(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) == fits
    assert (expression(pattern).fullmatch(name) is not None) == fits
