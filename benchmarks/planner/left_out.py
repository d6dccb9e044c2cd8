"""The headline of the planner: the error of each source under constants fitted without it.

    python -m benchmarks.planner.left_out [--rows N]

`FREE` lists the constants that no component measurement holds, with the values that are tried. For
each source they are fitted on all the others, each of them one vote. The source that was left out
is then predicted, all its rows. A constant of one framework is zero where no other source of that
framework is left to tell it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.machine import announce
from benchmarks.planner.clusters import machine_for
from benchmarks.planner.rows import Case, cases
from benchmarks.planner.validate import error
from plait.errors import PlanError
from plait.plan import Plan
from plait.predict.cost.model.describe import describe
from plait.predict.cost.records import Job
from plait.predict.cost.step import estimate_job
from plait.predict.cost.time.machine import Efficiency, Machine

FREE: dict[str, tuple[float, ...]] = {
    "matmul": (0.88, 0.91, 0.94, 0.97, 1.0),
    "memory": (0.75, 0.85, 0.93),
    "launch_seconds": (20e-6, 40e-6, 60e-6, 90e-6),
    "call_seconds": (45e-6, 90e-6, 135e-6, 200e-6),
    "eager_passes": (1.4, 1.8, 2.2, 2.7),
    "overlap": (0.3, 0.45, 0.6, 0.75, 0.9),
    "contention": (0.2, 0.35, 0.5, 0.7, 0.9),
    "congestion": (0.0, 0.12, 0.25, 0.4, 0.6),
    "step_seconds": (1e-3, 4e-3, 10e-3),
}
"""Constants of `Efficiency` that are fitted end to end, and the values that are tried."""
OF_FRAMEWORKS = ("late_seconds", "skew_seconds")
"""Constants of `Runtime` that hold for one framework."""
MOST_ROWS = 40
"""Rows of a source that take part in a fit; all of it is predicted when it is left out."""
SWEEPS = 4

Values = Mapping[str, float]


@dataclass(frozen=True)
class Effects:
    """The logarithm of predicted over published of some cases, and how each constant moves it."""

    sources: tuple[str, ...]
    start: tuple[float, ...]
    moves: Mapping[tuple[str, float], tuple[float, ...]]

    def logs(self, chosen: Values) -> list[float]:
        """Logarithms under chosen constants; their moves are added up."""
        logs = list(self.start)
        for item in chosen.items():
            logs = [log + move for log, move in zip(logs, self.moves[item], strict=True)]
        return logs

    def loss(self, chosen: Values, without: str = "") -> float:
        """Mean over the sources of the median size of the logarithm."""
        by_source: dict[str, list[float]] = {}
        for source, log in zip(self.sources, self.logs(chosen), strict=True):
            if source != without:
                by_source.setdefault(source, []).append(abs(log))
        return statistics.mean(statistics.median(logs) for logs in by_source.values())


def middle(free: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The middle of the values that are tried: where every fit begins."""
    return {name: values[len(values) // 2] for name, values in free.items()}


def fit(
    effects: Effects, free: Mapping[str, Sequence[float]], without: str = ""
) -> dict[str, float]:
    """The constants that suit all sources but one best, by sweeps over one constant at a time."""
    chosen = middle(free)
    for _ in range(SWEEPS):
        before = dict(chosen)
        for name, values in free.items():
            losses = [(effects.loss({**chosen, name: value}, without), value) for value in values]
            chosen[name] = min(losses)[1]
        if chosen == before:
            break
    return chosen


def predict(case: Case, machine: Machine, **habits: float) -> float:
    """Predicted seconds of a step of a case."""
    batch = int(str(case.config["train"]["global_batch"]))
    runtime = replace(case.framework.runtime, **habits) if habits else case.framework.runtime
    job = Job(describe(case.config), batch, "adamw", runtime)
    return estimate_job(job, Plan.parse(case.plan), machine).step_seconds


def errors_of(
    chosen_cases: Sequence[Case], chosen: Values | None, habits: Mapping[str, float] | None = None
) -> list[float]:
    """Relative errors of cases under constants; None leaves those that ship."""
    efficiency = None if chosen is None else replace(Efficiency(), **dict(chosen))
    machines: dict[tuple[str, ...], Machine] = {}
    found = []
    for case in chosen_cases:
        key = (case.device, case.row["gpus_per_node"], case.source, str(case.num_devices))
        if key not in machines:
            machines[key] = machine_for(case, efficiency)
        try:
            seconds = predict(case, machines[key], **(habits or {}))
        except PlanError:
            continue
        found.append(error(seconds, case.seconds or seconds))
    return found


def sample(rows: Sequence[Case], most: int) -> list[Case]:
    """Rows evenly spaced over each source."""
    by_source: dict[str, list[Case]] = {}
    for case in rows:
        by_source.setdefault(case.source, []).append(case)
    found = []
    for own in by_source.values():
        step = max(1.0, len(own) / most)
        found += [own[int(index * step)] for index in range(min(most, len(own)))]
    return found


def effects_of(rows: Sequence[Case], free: Mapping[str, Sequence[float]]) -> Effects:
    """The effects of each value of each free constant on these cases."""

    def logs(chosen: Values) -> tuple[float, ...]:
        return tuple(math.log1p(one) for one in errors_of(rows, chosen))

    centre = middle(free)
    start = logs(centre)
    moves: dict[tuple[str, float], tuple[float, ...]] = {}
    for name, values in free.items():
        for value in values:
            moved = start if value == centre[name] else logs({**centre, name: value})
            moves[name, value] = tuple(a - b for a, b in zip(moved, start, strict=True))
    return Effects(tuple(case.source for case in rows), start, moves)


def untold(rows: Sequence[Case], source: str) -> dict[str, float]:
    """Constants of single frameworks that only this source could tell: they are zero without it."""
    others = [case.framework.runtime for case in rows if case.source != source]
    return {
        name: 0.0 for name in OF_FRAMEWORKS if not any(getattr(runtime, name) for runtime in others)
    }


def median_size(errors: Sequence[float]) -> float:
    """Median of the absolute errors."""
    return statistics.median(map(abs, errors))


def left_out(rows: Sequence[Case], most: int = MOST_ROWS) -> list[dict[str, Any]]:
    """Each source: its error as shipped, fitted with all sources, and fitted without it."""
    effects = effects_of(sample(rows, most), FREE)
    everything = fit(effects, FREE)
    table = []
    for source in sorted({case.source for case in rows}):
        own = [case for case in rows if case.source == source]
        without = fit(effects, FREE, source)
        table.append(
            {
                "source": source,
                "rows": len(own),
                "shipped": median_size(errors_of(own, None)),
                "with": median_size(errors_of(own, everything)),
                "without": median_size(errors_of(own, without, untold(rows, source))),
                "constants": without,
            }
        )
    return table


HEADINGS = {
    "shipped": "in sample, as shipped",
    "with": "in sample, fitted here",
    "without": "source left out",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=MOST_ROWS)
    arguments = parser.parse_args()
    announce()
    rows = [case for case in cases()[0] if case.seconds]
    table = left_out(rows, arguments.rows)
    print(f"{'source':8} {'rows':>5} " + " ".join(f"{text:>22}" for text in HEADINGS.values()))
    for row in table:
        numbers = " ".join(f"{row[name]:22.1%}" for name in HEADINGS)
        print(f"{row['source']:8} {row['rows']:5} {numbers}")
    for label, pick in (("median", statistics.median), ("mean", statistics.mean)):
        numbers = " ".join(f"{pick([row[name] for row in table]):22.1%}" for name in HEADINGS)
        print(f"{label:8} {'':5} {numbers}")
    print("\nthe constants without each source, where they differ from the middle:")
    for row in table:
        centre = middle(FREE)
        moved = {name: value for name, value in row["constants"].items() if value != centre[name]}
        print(f"  {row['source']:6} {moved}")


if __name__ == "__main__":
    main()
