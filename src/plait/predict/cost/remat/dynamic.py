"""Which blocks recompute, by dynamic programming over blocks: fewest seconds within a memory.

Each block has a few options. An option keeps bytes, adds seconds, and has bytes at work while the
block is recomputed. Kept bytes add up over blocks, and of bytes at work the largest counts once. So
each bound on the work is tried. Within it a knapsack with one option of each block is solved
(Kellerer, Pferschy and Pisinger, "Knapsack Problems", 2004, chapter 11).

The states of the program are the sums of kept bytes, each with its fewest seconds. Those that are
worse in both are dropped. The answer is the optimum while `STATES` of them or fewer are left. Of
more, one is left in each of `STATES` cells of the spare memory. Each block then loses one cell at
most. So n blocks are at least as fast as the optimum of a spare memory smaller by n / `STATES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

STATES = 2048
"""Sums of kept bytes that are told apart after each block."""


@dataclass(frozen=True)
class Option:
    """A way to treat one block, in whole bytes of its rank and seconds of one micro-batch."""

    kept_bytes: int
    seconds: float
    working_bytes: int = 0
    """Bytes at work while the block is recomputed; 0 where it is not."""


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of a rank: `kept_factor * kept + working_factor * work <= limit_bytes`.

    The work is the largest of the chosen options, and `least_working` at least.
    """

    limit_bytes: float
    kept_factor: float = 1.0
    working_factor: float = 1.0
    least_working: float = 0.0

    def needed(self, kept: float, working: float) -> float:
        """Bytes of a choice."""
        work = max(self.least_working, working)
        return self.kept_factor * kept + self.working_factor * work

    def for_kept(self, working: float) -> int:
        """Bytes that may be kept beside so much work."""
        work = max(self.least_working, working)
        return floor((self.limit_bytes - self.working_factor * work) / self.kept_factor)


@dataclass(frozen=True)
class BlockChoice:
    """An option of each block, and whether they fit."""

    options: tuple[int, ...]
    fits: bool


def choose(
    blocks: Sequence[tuple[Option, ...]], room: MemoryBudget, states: int = STATES
) -> BlockChoice:
    """The fastest option of each block that fits together; the smallest where none fits.

    Of equal blocks the first ones recompute: theirs come last in backward, when least is kept. The
    first option of a block is taken everywhere where that fits.
    """
    first = (0,) * len(blocks)
    if _needed(blocks, first, room) <= room.limit_bytes:
        return BlockChoice(first, fits=True)
    best: tuple[float, tuple[int, ...]] | None = None
    bounds = sorted({option.working_bytes for options in blocks for option in options})
    for bound in bounds:
        best_within = _within(blocks, bound, room.for_kept(bound), states)
        if best_within is not None and (best is None or best_within[0] < best[0]):
            best = best_within
    if best is not None:
        return BlockChoice(_in_order(blocks, best[1]), fits=True)
    smallest = min((_smallest(blocks, bound, room) for bound in bounds), default=(0.0, first))
    return BlockChoice(smallest[1], fits=False)


def _needed(
    blocks: Sequence[tuple[Option, ...]], chosen: Sequence[int], room: MemoryBudget
) -> float:
    taken = [options[index] for options, index in zip(blocks, chosen, strict=True)]
    working = max((option.working_bytes for option in taken), default=0)
    return room.needed(sum(option.kept_bytes for option in taken), working)


def _smallest(
    blocks: Sequence[tuple[Option, ...]], bound: int, room: MemoryBudget
) -> tuple[float, tuple[int, ...]]:
    """The bytes of each block's smallest option within a bound of the work, and these options."""
    chosen = []
    for options in blocks:
        within = _allowed(options, bound) or _allowed(options, _least_work(options))
        chosen.append(min((options[index].kept_bytes, index) for index in within)[1])
    return _needed(blocks, chosen, room), tuple(chosen)


def _allowed(options: tuple[Option, ...], bound: int) -> list[int]:
    """The options within a bound of the work."""
    return [index for index, option in enumerate(options) if option.working_bytes <= bound]


def _least_work(options: tuple[Option, ...]) -> int:
    return min(option.working_bytes for option in options)


def _within(
    blocks: Sequence[tuple[Option, ...]], bound: int, budget: int, states: int
) -> tuple[float, tuple[int, ...]] | None:
    """The fewest seconds and their options, of kept bytes up to `budget`; None where none fits."""
    allowed = [_allowed(options, bound) for options in blocks]
    if not all(allowed):
        return None
    least = []
    for options, indices in zip(blocks, allowed, strict=True):
        least.append(min(options[index].kept_bytes for index in indices))
    spare = budget - sum(least)
    if spare < 0:
        return None
    front: dict[int, float] = {0: 0.0}
    steps: list[dict[int, tuple[int, int]]] = []
    for options, indices, base in zip(blocks, allowed, least, strict=True):
        reached: dict[int, tuple[float, int, int]] = {}
        for before, seconds in front.items():
            for index in indices:
                kept = before + options[index].kept_bytes - base
                spent = seconds + options[index].seconds
                if kept <= spare and (kept not in reached or spent < reached[kept][0]):
                    reached[kept] = (spent, index, before)
        left = _thinned(_front(reached), spare, states)
        front = {kept: reached[kept][0] for kept in left}
        steps.append({kept: reached[kept][1:] for kept in left})
    last = min(front, key=lambda kept: (front[kept], kept))
    seconds = front[last]
    chosen = []
    for step in reversed(steps):
        index, last = step[last]
        chosen.append(index)
    return seconds, tuple(reversed(chosen))


def _front(reached: dict[int, tuple[float, int, int]]) -> list[int]:
    """The sums of bytes with fewer seconds than every smaller sum, in order."""
    left = []
    fewest = float("inf")
    for kept in sorted(reached):
        if reached[kept][0] < fewest:
            fewest = reached[kept][0]
            left.append(kept)
    return left


def _thinned(front: list[int], spare: int, states: int) -> list[int]:
    """The fastest sum of each cell, where there are more sums than cells."""
    if len(front) <= states:
        return front
    width = ceil((spare + 1) / states)
    return list({kept // width: kept for kept in front}.values())


def _in_order(blocks: Sequence[tuple[Option, ...]], chosen: Sequence[int]) -> tuple[int, ...]:
    """The options of equal blocks, with the most seconds first."""
    places: dict[tuple[Option, ...], list[int]] = {}
    for place, options in enumerate(blocks):
        places.setdefault(options, []).append(place)
    ordered = list(chosen)
    for options, own in places.items():
        words = sorted((chosen[place] for place in own), key=lambda one: -options[one].seconds)
        for place, word in zip(own, words, strict=True):
            ordered[place] = word
    return tuple(ordered)
