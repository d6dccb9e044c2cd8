"""The one language of patterns for names of modules: `*` stands for one name between dots."""

from __future__ import annotations

import re
from collections.abc import Iterable


def expression(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern, for many names; to be used with `fullmatch`."""
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern.

    >>> matches("blocks.*.norm1", "blocks.12.norm1"), matches("blocks.*", "blocks.0.norm1")
    (True, False)
    """
    return expression(pattern).fullmatch(name) is not None


def matches_any(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern fits at least one of the names."""
    return any(map(expression(pattern).fullmatch, names))
