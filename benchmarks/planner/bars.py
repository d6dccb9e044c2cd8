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
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from benchmarks.machine import announce
from benchmarks.planner.rows import Case, cases
from benchmarks.planner.validate import Pair, contradicted, peak, run
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
MARGINS = tuple(step / 100 for step in range(61))
"""Logarithms that are added to either side of a bar, of which the least that is enough is taken."""


def widened(values: Sequence[float], margin: float) -> list[float]:
    """Quantiles moved away from their median: the outermost by a factor, inner ones by less of it.

    Sources differ more from each other than runs of one source do. So the spread of the sources at
    hand is too narrow for one that nobody has seen; the margin makes up for it.
    """
    half = (len(values) - 1) / 2
    return [
        round(value * math.exp(margin * (place - half) / half), 4)
        for place, value in enumerate(values)
    ]


def margin_of(by_reach: dict[str, list[Residual]]) -> float:
    """The least margin with which bars hold for nine of ten sources that were left out."""
    for margin in MARGINS:
        if coverage(by_reach, margin).held >= WANTED:
            return margin
    return MARGINS[-1]


@dataclass(frozen=True)
class Coverage:
    """How often a bar holds whose source was left out, each source one vote."""

    held: float
    above: float
    """Rows above their bar: for memory, those that take more than it says."""
    sources: int


def coverage(by_reach: dict[str, list[Residual]], margin: float = 0.0) -> Coverage:
    """How often bars hold for sources that were left out."""
    sources = sorted({source for rows in by_reach.values() for source, _ in rows})
    held: list[float] = []
    above: list[float] = []
    for source in sources:
        left = {
            place: [row for row in rows if row[0] != source] for place, rows in by_reach.items()
        }
        own = [
            (place, value) for place, rows in by_reach.items() for one, value in rows
            if one == source
        ]  # fmt: skip
        bars = {place: sides(left, place, margin) for place in {place for place, _ in own}}
        held.append(
            sum(bars[place][0] <= value <= bars[place][1] for place, value in own) / len(own)
        )
        above.append(sum(value > bars[place][1] for place, value in own) / len(own))
    number = len(sources)
    return Coverage(sum(held) / number, sum(above) / number, number)


def sides(by_reach: dict[str, list[Residual]], place: str, margin: float) -> tuple[float, float]:
    """The two sides of a bar; it holds the predicted number itself."""
    low, _, high = widened(quantiles(known(by_reach, place), (0.05, 0.5, 0.95)), margin)
    return min(1.0, low), max(1.0, high)


def known(by_reach: dict[str, list[Residual]], place: str) -> list[Residual]:
    """The residuals behind a bar: those of its reach, or all where fewer than two sources have
    it.
    """
    rows = by_reach[place]
    if len({source for source, _ in rows}) >= 2:
        return rows
    return [row for others in by_reach.values() for row in others]


RATIOS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5)
"""Predicted seconds of two plans over one another, from which on their order is counted."""


def orders(pairs: Iterable[Pair]) -> dict[float, tuple[int, int]]:
    """How many pairs of published plans were in the predicted order, of how many, by ratio.

    A pair is of one model, cluster and batch. Rows that their own table contradicts are left out.
    """
    pairs = list(pairs)
    odd = contradicted(pairs)
    groups: dict[tuple[str, str, str], list[tuple[str, float, float]]] = defaultdict(list)
    for case, estimate in pairs:
        if case.seconds and case.id not in odd:
            key = (case.source, case.group, str(case.config["train"]["global_batch"]))
            groups[key].append((case.plan, estimate.step_seconds, case.seconds))
    found = dict.fromkeys(RATIOS, (0, 0))
    for runs in groups.values():
        for (plan, predicted, measured), (other, second, third) in combinations(runs, 2):
            if plan != other:
                ratio = max(predicted / second, second / predicted)
                edge = max(one for one in RATIOS if one <= ratio)
                right, number = found[edge]
                found[edge] = (right + ((predicted < second) == (measured < third)), number + 1)
    return found


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
            margin = margin_of(by_reach)
            plain_held = coverage(by_reach).held
            left = coverage(by_reach, margin)
            print(
                f"{name} {kind}: bars hold for {left.held:.0%} of {left.sources} sources, each "
                f"left out once, {left.above:.1%} of their rows above (wider by a factor of "
                f"{math.exp(margin):.2f} on either side; {plain_held:.0%} without)"
            )
            places = {
                place: widened(quantiles(known(by_reach, place)), margin)
                for place in sorted(by_reach)
            }
            for place, values in places.items():
                rows = by_reach[place]
                number = len({source for source, _ in rows})
                low, middle, high = values[1], values[10], values[19]
                where = f"  {place:14} {len(rows):4} rows of {number:2} sources"
                print(f"{where}: {low:.2f} {middle:.2f} {high:.2f}")
            if name == "named":
                table[kind] = places
        if name == "named":
            found_orders = orders(pairs)
            for ratio, (right, number) in found_orders.items():
                print(f"order of plans {ratio:.2f} apart: right in {right} of {number} pairs")
            table["order"] = {
                f"{ratio:g}": [round(right / number, 2)]
                for ratio, (right, number) in found_orders.items()
            }
    if arguments.write:
        OUT.write_text(json.dumps(table, indent=1) + "\n")
        ROWS.write_text(json.dumps(behind(cases()[0]), indent=1) + "\n")
        print(f"written to {OUT}")


if __name__ == "__main__":
    main()
