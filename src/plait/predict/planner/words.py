"""Shares and factors in the words of an explanation."""

from __future__ import annotations

import math


def percent(part: float) -> str:
    """A share for people; tenths where it is below ten."""
    return f"{part:,.0%}" if part >= 0.1 else f"{part:.1%}"


def times(factor: float) -> str:
    """A factor by which something does not fit: above 1, as it is rounded up."""
    if factor < 1.1:
        return f"{max(1.01, math.ceil(factor * 100) / 100):.2f}"
    return f"{factor:.2g}" if factor < 100 else f"{factor:,.0f}"
