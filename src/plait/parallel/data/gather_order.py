"""The order in which a rank gathers its layers: a gather is collective, so it must be every rank's.

Gathers of equal size do not show that they are of different layers. So each rank adds a number of
its order, and its square, to the sums of the step. Where all numbers are equal, and only there, the
mean of the squares is the square of the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from plait.errors import ModelError, RankFailed, RunError

PRIME = 1_048_573  # below 2^20, so that the squares of 8,192 ranks are exact in float64
SHOWN = 6  # layers in a message


class GatherOrder:
    """The layers that the forwards of one step have gathered, in their order."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """A step begins."""
        self._number = 0
        self._names: list[str] = []

    def add(self, index: int, name: str) -> None:
        """A layer is gathered."""
        self._number = (self._number * 31 + index + 1) % PRIME
        if len(self._names) < SHOWN:
            self._names.append(name)

    def marks(self) -> list[float]:
        """One, the number of this order, and its square: three numbers, to be summed over the
        ranks.
        """
        return [1.0, float(self._number), float(self._number**2)]

    def check(self, sums: Sequence[float]) -> None:
        """Raise `ModelError` unless the sums of `marks` over the ranks are those of one order."""
        count, total, squares = (round(value) for value in sums)
        if count * squares != total**2:
            raise ModelError(f"this rank called {', '.join(self._names)} ...; {_ADVICE}")

    @contextmanager
    def naming(self, action: str) -> Iterator[None]:
        """Say what this rank does where ranks have called different things.

        Raises:
            ModelError: ranks have called different things.
        """
        try:
            yield
        except RankFailed:
            raise
        except RunError as failure:
            raise ModelError(f"this rank {action}; {_ADVICE} ({failure})") from failure


_ADVICE = (
    "zero3 gathers layers as the forward calls them, and another rank calls others or in another "
    "order: draw the order from numbers that all ranks share, as random.Random(step), or take "
    "zero2, under which layers are whole; a weight that code reads in the forward is gathered too, "
    "so a hook on one rank alone must not read one"
)
