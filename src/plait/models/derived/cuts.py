"""A tensor cut over ranks, as the code of a model reshapes it.

A dimension is a row of parts, such as heads of queries beside one head of keys. Each part is cut
evenly in itself, or kept whole on every rank. Reshaping keeps the order of elements, so parts are
counted in elements there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Part = tuple[int, bool]


class Misfit(Exception):
    """A cut that does not pass an operation, or two that contradict each other.

    Users read its text behind the name of a layer that stays whole.
    """


@dataclass(frozen=True)
class Cut:
    """The dimension that is cut, and its parts: their sizes, and whether each is cut."""

    dim: int
    parts: tuple[Part, ...]

    @property
    def pattern(self) -> tuple[Part, ...]:
        """The shortest row of parts whose repetition is the dimension."""
        count = len(self.parts)
        for length in range(1, count + 1):
            if count % length == 0 and self.parts == self.parts[:length] * (count // length):
                return self.parts[:length]
        return self.parts

    def local(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape on one of `size` ranks."""
        local = list(shape)
        local[self.dim] = sum(n // size if cut else n for n, cut in self.parts)
        return tuple(local)

    def of(self, shape: Sequence[int]) -> str:
        """The dimension that is cut of a tensor of this shape, in words."""
        return f"dimension {self.dim} of {list(shape)}, of which each rank has a part"


ALIKE = "alike"
"""The mark of a value that every rank has whole, between cut ones."""

Want = Cut | str


def even(dim: int, length: int) -> Cut:
    """A dimension cut evenly, in one part."""
    return Cut(dim, ((length, True),))


def joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Neighbours that are whole as one part."""
    merged: list[Part] = []
    for length, cut in parts:
        if merged and not cut and not merged[-1][1]:
            merged[-1] = (merged[-1][0] + length, False)
        else:
            merged.append((length, cut))
    return tuple(merged)


def reshaped(cut: Cut, before: Sequence[int], after: Sequence[int], size: int) -> Cut:
    """The cut of the same elements in another shape. Raises `Misfit` where no dimension has it."""
    inner = math.prod(before[cut.dim + 1 :])
    pattern = [(length * inner, whole) for length, whole in cut.pattern]
    period = sum(length for length, _ in pattern)
    chunks = [length // size if is_cut else length for length, is_cut in pattern]
    for dim, length in enumerate(after):
        inside = math.prod(after[dim + 1 :])
        fits = (length * inside) % period == 0 and all(chunk % inside == 0 for chunk in chunks)
        if fits and length > 1:
            parts = [(count // inside, is_cut) for count, is_cut in pattern]
            return Cut(dim, joined(parts * (length * inside // period)))
    raise Misfit(
        f"a view of {list(after)} as {list(before)} mixes dimensions, and no one of the first is "
        f"dimension {cut.dim} of the second, of which each rank has a part"
    )


def composed(pieces: Sequence[tuple[int, int, Want]], length: int) -> tuple[Part, ...]:
    """The parts of a dimension from those of its pieces; those without a demand stay whole."""
    parts: list[Part] = []
    position = 0
    for start, stop, want in sorted(set(pieces), key=lambda piece: piece[:2]):
        if start < position:
            raise Misfit(
                f"two slices overlap in a dimension of {length} numbers: one ends at {position}, "
                f"the next begins at {start}"
            )
        if start > position:
            parts.append((start - position, False))
        parts += want.parts if isinstance(want, Cut) else ((stop - start, False),)
        position = stop
    if position < length:
        parts.append((length - position, False))
    return joined(parts)


def in_words(want: Want) -> str:
    """A demand in words.

    >>> in_words(Cut(1, ((64, True), (32, False))))
    'cut along dimension 1 in parts 64+32!'
    >>> in_words(ALIKE)
    'whole'
    """
    if not isinstance(want, Cut):
        return "whole"
    parts = parts_in_words(want.parts)
    return f"cut along dimension {want.dim}{f' in parts {parts}' if parts else ''}"


def parts_in_words(parts: Sequence[Part]) -> str:
    """Parts as a table of roles has them, `!` behind one that stays whole; empty for one part.

    >>> parts_in_words(((64, True), (32, False)))
    '64+32!'
    """
    if len(parts) == 1 and parts[0][1]:
        return ""
    return "+".join(f"{length}{'' if is_cut else '!'}" for length, is_cut in parts)
