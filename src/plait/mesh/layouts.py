"""Four letters: what the ranks of one mesh axis hold of one tensor.

`R` replicated: the same value, used differently by each rank, so its gradients are partial. `I`
invariant: the same value, the same use. `S(dim)` sharded along a tensor dimension, `P` a partial
sum. The dual of a layout is the layout of its gradient. With it one law gives every backward: the
backward of `a -> b` is `b* -> a*`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from plait.errors import PlanError


@dataclass(frozen=True)
class Layout(ABC):
    """The part of a tensor that each rank of one axis holds. Written `R`, `I`, `S(dim)`, `P`."""

    letter: ClassVar[str]
    """One of `R I S P`: the row of the transition table, whatever the dimension."""

    @abstractmethod
    def dual(self) -> Layout:
        """The layout of the gradient of a tensor that has this layout."""

    def __str__(self) -> str:
        return self.letter

    @staticmethod
    def parse(text: str) -> Layout:
        """Read the text form: the inverse of `str`.

        Raises:
            PlanError: the text is none of `R`, `I`, `P`, `S(0)`, `S(-1)`, ...
        """
        plain: dict[str, Layout] = {"R": REPLICATED, "I": INVARIANT, "P": PARTIAL}
        if text in plain:
            return plain[text]
        if match := re.fullmatch(r"S\((-?\d+)\)", text):
            return Sharded(int(match[1]))
        raise PlanError(f"{text!r} is no layout; write R, I, P or S(dim), for example S(0)")


@dataclass(frozen=True)
class Replicated(Layout):
    """One value on every rank, used differently: the gradients are partial sums."""

    letter: ClassVar[str] = "R"

    def dual(self) -> Layout:
        """`P`."""
        return PARTIAL


@dataclass(frozen=True)
class Invariant(Layout):
    """One value and one use on every rank: the gradients agree too."""

    letter: ClassVar[str] = "I"

    def dual(self) -> Layout:
        """`I`."""
        return self


@dataclass(frozen=True)
class Sharded(Layout):
    """Rank k of the axis holds the k-th of equal parts along tensor dimension `dim` (negative
    counts from the end).
    """

    dim: int

    letter: ClassVar[str] = "S"

    def dual(self) -> Layout:
        """`S(dim)` itself."""
        return self

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Partial(Layout):
    """The value is the sum of what the ranks hold."""

    letter: ClassVar[str] = "P"

    def dual(self) -> Layout:
        """`R`."""
        return REPLICATED


REPLICATED = Replicated()
INVARIANT = Invariant()
PARTIAL = Partial()
