"""Error bars of an estimate, from the residuals of published runs.

A residual is published over predicted. `residuals.json` holds their quantiles, by how far the run
reaches. They are those of frameworks that were named, since what runs is known here too.
`benchmarks.planner.bars` makes the file, and says how often bars hold for sources left out.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

LEVELS: Final = tuple(step / 20 for step in range(21))
"""The levels of the stored quantiles; 0.05 and 0.95 bound the 90 % bar."""
LOW: Final = LEVELS.index(0.05)
HIGH: Final = LEVELS.index(0.95)
MANY: Final = 64
"""Devices above which a run counts as large."""

Quantiles = Mapping[str, Mapping[str, Sequence[float]]]


def reach(num_devices: int, node_size: int) -> str:
    """How far a run reaches: one node, several nodes, or more than 64 devices."""
    if num_devices > MANY:
        return "large"
    return "one node" if num_devices <= node_size else "several nodes"


@lru_cache(maxsize=1)
def _file() -> Quantiles:
    found: Quantiles = json.loads(Path(__file__).with_name("residuals.json").read_text())
    return found


def stored() -> Quantiles:
    """The quantiles by kind and by reach."""
    return {kind: _file()[kind] for kind in ("time", "memory")}


def quantiles_of(kind: str, place: str) -> Sequence[float]:
    """The quantiles of "time" or "memory" residuals."""
    by_place = stored()[kind]
    return by_place[place] if place in by_place else by_place["several nodes"]


def bar(value: float, kind: str, place: str, width: float = 1.0) -> list[float]:
    """The 90 % bar [low, high] round a predicted number; it holds the number itself. `width` is
    that of its logarithm, of the usual one.
    """
    quantiles = quantiles_of(kind, place)
    low = min(1.0, quantiles[LOW]) ** width
    high = max(1.0, quantiles[HIGH]) ** width
    return [value * low, value * high]


def width_for(log_ratio: float, place: str) -> float:
    """The width of the time bar that just holds a run; `log_ratio` is the logarithm of its seconds
    over those predicted.
    """
    quantiles = quantiles_of("time", place)
    end = math.log(max(1.0, quantiles[HIGH]) if log_ratio > 0 else min(1.0, quantiles[LOW]))
    return log_ratio / end if end else math.inf


def probability_below(limit: float, value: float, place: str) -> float:
    """The probability that the memory of a run stays below a limit, given its prediction."""
    if value <= 0:
        return 1.0
    quantiles = quantiles_of("memory", place)
    ratio = limit / value
    if ratio <= quantiles[0]:
        return 0.0
    if ratio >= quantiles[-1]:
        return 1.0
    upper = bisect_right(quantiles, ratio)
    below = quantiles[upper - 1]
    above = quantiles[upper]
    part = (ratio - below) / (above - below)
    return LEVELS[upper - 1] + part * (LEVELS[upper] - LEVELS[upper - 1])


def share_for(risk: float, place: str) -> float:
    """The part of the memory that a plan may be predicted to take.

    A run of such a plan then runs out of memory with the probability `risk` at most.
    """
    quantiles = quantiles_of("memory", place)
    position = (1 - risk) * (len(LEVELS) - 1)
    lower = min(int(position), len(LEVELS) - 2)
    part = position - lower
    ratio = quantiles[lower] + part * (quantiles[lower + 1] - quantiles[lower])
    return min(1.0, 1 / ratio)


def order_probability(ratio: float) -> float:
    """The probability that the faster of two plans is the one that is predicted to be.

    `ratio` is the slower prediction over the faster. Pairs of published plans of one model on one
    cluster are behind it.
    """
    edges = _file()["order"]
    known = [float(edge) for edge in edges if float(edge) <= max(1.0, ratio)]
    return edges[f"{max(known):g}"][0]
