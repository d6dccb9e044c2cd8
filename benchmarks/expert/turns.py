"""Systems take turns, one pass each round, so that a change of the machine's speed meets all alike;
tables show medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from benchmarks.spread import quartile_text


def take_turns(systems: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each pass; a first round warms up and is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for index in range(rounds + 1):
        for name, run in systems.items():
            began = time.perf_counter()
            run()
            if index:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def table(seconds: Mapping[str, list[float]], own: str) -> str:
    """Median milliseconds, and the median and quartiles of the ratio to `own`, taken round by
    round.
    """
    lines = [f"| system | ms (median) | ratio to {own} (median, [quartiles]) |", "|---|---|---|"]
    for name, values in seconds.items():
        ratios = [value / mine for value, mine in zip(values, seconds[own], strict=True)]
        milliseconds = 1e3 * statistics.median(values)
        lines.append(f"| {name} | {milliseconds:.1f} | {quartile_text(ratios)} |")
    return "\n".join(lines)
