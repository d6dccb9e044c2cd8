"""Bounds of numbers that people and probes give: they catch slips, not unusual machines."""

from __future__ import annotations

from typing import Final, NamedTuple

MOST_DEVICES: Final = 10_000_000


class Bounds(NamedTuple):
    """The range of a number, and the unit in which it is given."""

    least: float
    most: float
    unit: str
    whole: bool = False


_PRINTED: Final = 1e300  # a whole number above it has no float to be printed as


def number_faults(key: str, number: object, bounds: Bounds) -> list[str]:
    """The message of a value that is no number or out of its bounds, if it is."""
    kind = "a whole number" if bounds.whole else "a number"
    if isinstance(number, bool) or not isinstance(number, int if bounds.whole else (int, float)):
        return [f"{key} must be {kind} of {bounds.unit}, not {number!r}"]
    if not bounds.least <= number <= bounds.most:
        is_long = isinstance(number, int) and abs(number) > _PRINTED
        shown = "a number of hundreds of digits" if is_long else f"{number:g}"
        return [
            f"{key} is {shown} {bounds.unit}, which cannot be; it must be between "
            f"{bounds.least:g} and {bounds.most:g}"
        ]
    return []
