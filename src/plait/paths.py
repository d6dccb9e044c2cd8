"""The paths of a run to equal numbers, chosen by size, and those that it took.

Small tensors are summed by every rank, large ones range by range. Short sequences meet at once,
long ones part by part. The code asks `beyond` at each such place. A proof passes other limits, so
that a small model takes every way that a large one takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager


class Paths:
    """The limits of one world, and the ways that have been taken.

    `limits` replace those of the code, by name; what they do not name stays as it is.
    """

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits: Mapping[str, int] = dict(limits or {})
        self._taken: dict[str, set[bool]] = {}

    @contextmanager
    def limited(self, limits: Mapping[str, int]) -> Iterator[None]:
        """Other limits, by name, inside."""
        before = self._limits
        self._limits = dict(limits)
        try:
            yield
        finally:
            self._limits = before

    def limit(self, name: str, default: int) -> int:
        """The largest amount that takes the first way; `default` is the code's own."""
        return self._limits.get(name, default)

    def beyond(self, name: str, amount: int, default: int) -> bool:
        """Whether an amount is above its limit, and so takes the second way."""
        second = amount > self._limits.get(name, default)
        self.note(name, second)
        return second

    def note(self, name: str, second: bool) -> None:
        """Remember which way was taken at a place."""
        self._taken.setdefault(name, set()).add(second)

    def taken(self) -> dict[str, tuple[bool, ...]]:
        """Which ways were taken, by place: False below the limit, True above it."""
        return {name: tuple(sorted(ways)) for name, ways in sorted(self._taken.items())}


def not_walked(ranks: Iterable[Mapping[str, Iterable[bool]]]) -> list[str]:
    """The ways that no rank took at a place where some rank had the choice, as `name: above`.

    >>> not_walked([{"sums": (False,)}, {"sums": (False,), "x": (False, True)}])
    ['sums: above']
    """
    ways: dict[str, set[bool]] = {}
    for taken in ranks:
        for name, ways_found in taken.items():
            ways.setdefault(name, set()).update(ways_found)
    words = {False: "up to the limit", True: "above"}
    return [
        f"{name}: {words[way]}"
        for name, ways_found in sorted(ways.items())
        for way in (False, True)
        if way not in ways_found
    ]
