"""Bytes and seconds as words of a page: three or four digits, and the unit that suits them."""

from __future__ import annotations

from typing import Final

SIZES: Final = ("B", "kB", "MB", "GB", "TB")


def size_words(count: float) -> str:
    """Bytes: `594 kB`, `5.94 MB`."""
    unit = 0
    while count >= 999.5 and unit < len(SIZES) - 1:
        count, unit = count / 1000, unit + 1
    return f"{_digits(count)} {SIZES[unit]}"


def time_words(seconds: float) -> str:
    """Seconds: `850 µs`, `13.2 ms`, `4.03 s`."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds)} s"


def milliseconds(seconds: float | None) -> str:
    """Seconds: `13.2 ms`; a dash where they are unknown."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def percent(fraction: float | None) -> str:
    """A fraction: `12.5%`; a dash where it is unknown."""
    return "-" if fraction is None else f"{fraction:.1%}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
