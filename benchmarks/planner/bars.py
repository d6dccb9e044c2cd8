"""The error bars of the planner: residuals of published runs, and how often bars hold.

    python -m benchmarks.planner.bars [--write]

Each source has one vote. Coverage is leave-one-source-out: the bars of a source come from all the
others. The constants of the cost model were set with all rows in sight, so the residuals are those
of rows that the model has seen. `--write` stores the quantiles in
`src/plait/predict/cost/residuals.json`, which `estimate` reads, and the names of their sources.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.machine import announce
from benchmarks.planner.rows import Case, cases
from benchmarks.planner.validate import Pair, peak, run
from plait.predict.cost.bars import LEVELS, reach

OUT = Path(__file__).parents[2] / "src" / "plait" / "predict" / "cost" / "residuals.json"
ROWS = OUT.parents[2] / "explore" / "page" / "rows.json"
"""The sources behind the bars, which the page of plans names."""
MODES = {"named": "name", "plain": "plan"}
"""What the asker says: the framework's name beside plan and preset, or those two alone."""

Residual = tuple[str, float]
"""A source, and published over predicted."""


def residuals(pairs: Iterable[Pair]) -> dict[str, dict[str, list[Residual]]]:
    """Kind (time, memory) -> reach -> residuals."""
    found: dict[str, dict[str, list[Residual]]] = {
        "time": defaultdict(list),
        "memory": defaultdict(list),
    }
    for case, estimate in pairs:
        place = reach(case.num_devices, int(case.row["gpus_per_node"] or 8))
        if case.seconds:
            found["time"][place].append((case.source, case.seconds / estimate.step_seconds))
        if case.peak_bytes:
            found["memory"][place].append((case.source, case.peak_bytes / peak(case, estimate)))
    return found


def behind(chosen: Iterable[Case]) -> dict[str, dict[str, dict[str, int]]]:
    """Kind (time, memory) -> reach -> source -> its published runs."""
    found: dict[str, dict[str, dict[str, int]]] = {"time": {}, "memory": {}}
    for case in chosen:
        place = reach(case.num_devices, int(case.row["gpus_per_node"] or 8))
        for kind, value in (("time", case.seconds), ("memory", case.peak_bytes)):
            if value:
                sources = found[kind].setdefault(place, {})
                name = published_in(case)
                sources[name] = sources.get(name, 0) + 1
    return found


def published_in(case: Case) -> str:
    """The page or the paper of a run; of runs in files of their own the repository."""
    name = case.row["source"]
    return name.split()[0] if name.endswith(".json") else name


def quantiles(rows: Sequence[Residual], levels: Sequence[float] = LEVELS) -> list[float]:
    """Quantiles of residuals in which each source weighs alike, but for those of a few rows.

    A source of fewer than `FULL_VOTE` rows has a part of a vote: two odd runs are no spread.
    """
    count: dict[str, int] = defaultdict(int)
    for source, _ in rows:
        count[source] += 1
    votes = sum(min(1.0, number / FULL_VOTE) for number in count.values())
    ordered = sorted(
        (value, min(1.0, count[source] / FULL_VOTE) / count[source] / votes)
        for source, value in rows
    )
    answers = []
    for level in levels:
        below = 0.0
        answer = ordered[-1][0]
        for value, weight in ordered:
            below += weight
            if below >= level:
                answer = value
                break
        answers.append(round(answer, 4))
    return answers


FULL_VOTE = 8
"""Rows from which on a source has a whole vote."""
WANTED = 0.9
STRETCHES = tuple(1 + step / 10 for step in range(31))
"""Factors on the distance of a quantile from the median, in logarithms, that are tried."""


def stretched(values: Sequence[float], stretch: float) -> list[float]:
    """Quantiles moved away from their median by a factor, in logarithms.

    Sources differ more from each other than runs of one source do. So the spread of the sources at
    hand is too narrow for one that nobody has seen; the factor makes up for it.
    """
    middle = values[len(values) // 2]
    return [round(middle * (value / middle) ** stretch, 4) for value in values]


def stretch_of(by_reach: dict[str, list[Residual]]) -> float:
    """The least factor with which bars hold for nine of ten sources that were left out."""
    for stretch in STRETCHES:
        if coverage(by_reach, stretch)[0] >= WANTED:
            return stretch
    return STRETCHES[-1]


def coverage(by_reach: dict[str, list[Residual]], stretch: float = 1.0) -> tuple[float, int]:
    """How often a bar holds whose source was left out, each source one vote, and the sources."""
    everything = [(place, *row) for place, rows in by_reach.items() for row in rows]
    sources = sorted({source for _, source, _ in everything})
    votes = []
    for source in sources:
        inside = total = 0
        for place, own, value in everything:
            if own != source:
                continue
            others = [row for row in by_reach[place] if row[0] != source]
            if len({one for one, _ in others}) < 2:
                others = [(one, ratio) for _, one, ratio in everything if one != source]
            low, _, high = stretched(quantiles(others, (0.05, 0.5, 0.95)), stretch)
            inside += low <= value <= high
            total += 1
        votes.append(inside / total)
    return sum(votes) / len(votes), len(sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    announce()
    table: dict[str, dict[str, list[float]]] = {}
    for name, plain in MODES.items():
        pairs, _ = run(cases()[0], plain)
        found = residuals(pairs)
        for kind, by_reach in found.items():
            stretch = stretch_of(by_reach)
            plain_held, sources = coverage(by_reach)
            held, _ = coverage(by_reach, stretch)
            print(
                f"{name} {kind}: bars hold for {held:.0%} of {sources} sources, each left out once "
                f"(stretched by {stretch:.1f}; {plain_held:.0%} without)"
            )
            places = {
                place: stretched(quantiles(rows), stretch)
                for place, rows in sorted(by_reach.items())
            }
            for place, values in places.items():
                rows = by_reach[place]
                number = len({source for source, _ in rows})
                low, middle, high = values[1], values[10], values[19]
                where = f"  {place:14} {len(rows):4} rows of {number:2} sources"
                print(f"{where}: {low:.2f} {middle:.2f} {high:.2f}")
            if name == "named":
                table[kind] = places
    if arguments.write:
        OUT.write_text(json.dumps(table, indent=1) + "\n")
        ROWS.write_text(json.dumps(behind(cases()[0]), indent=1) + "\n")
        print(f"written to {OUT}")


if __name__ == "__main__":
    main()
