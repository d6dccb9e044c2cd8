"""How far repeated measurements of one thing lie apart, as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third, of what was measured: at least one number. One
    number is its own quartiles.
    """
    several = numbers if len(numbers) > 1 else [*numbers, *numbers]
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return low, middle, high


def quartile_text(numbers: Sequence[float], form: str = ".2f") -> str:
    """The median, with the quartiles in brackets. `form`: how a number is written."""
    low, middle, high = quartiles(numbers)
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"
