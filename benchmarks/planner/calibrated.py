"""Three rows of a source as if they were one's own: the error of its others, before and after.

    python -m benchmarks.planner.calibrated [--known N] [--draws N]

What is known of a run is its plan, its preset and its framework. For each source of published runs,
`--known` rows are drawn and calibrate the preset. The other rows are predicted without and with the
factors. Each source has one vote.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from dataclasses import dataclass

from benchmarks.machine import announce
from benchmarks.planner.clusters import preset_machine
from benchmarks.planner.rows import Case, cases
from benchmarks.planner.validate import plainly
from plait.cluster.calibration import Calibration
from plait.errors import PlanError
from plait.plan import Plan
from plait.predict.cost.bars import bar
from plait.predict.cost.calibrate import AskedStep, fitted, widened
from plait.predict.cost.machines import calibrated
from plait.predict.cost.model.describe import describe
from plait.predict.cost.records import Job
from plait.predict.cost.step import estimate_job
from plait.predict.cost.time.machine import Efficiency

FEWEST = 8
MOST = 40


@dataclass(frozen=True)
class Outcome:
    before: list[float]
    after: list[float]
    held: list[bool]


def asked(row: Case) -> AskedStep:
    case = plainly(row, "name")
    batch = int(str(case.config["train"]["global_batch"]))
    job = Job(describe(case.config), batch, "adamw", case.framework.runtime)
    assert case.seconds is not None
    return AskedStep(job, Plan.parse(case.plan), case.seconds)


def outcome(rows: list[tuple[Case, AskedStep]], known: int, rng: random.Random) -> Outcome:
    picked = rng.sample(range(len(rows)), known)

    def log(row: int, factors: Calibration) -> float:
        case, step = rows[row]
        machine = preset_machine(case, calibrated(Efficiency(), factors))
        return math.log(step.seconds / estimate_job(step.job, step.plan, machine).step_seconds)

    def reach(row: int) -> str:
        case, step = rows[row]
        return estimate_job(step.job, step.plan, preset_machine(case)).reach

    found = fitted(len(picked), lambda at, factors: log(picked[at], factors))
    found = widened(found, [(log(at, found), reach(at)) for at in picked])
    before, after, held = [], [], []
    for row in range(len(rows)):
        if row in picked:
            continue
        case, step = rows[row]
        plain = log(row, Calibration())
        own = log(row, found)
        before.append(abs(math.expm1(-plain)))
        after.append(abs(math.expm1(-own)))
        guess = estimate_job(step.job, step.plan, preset_machine(case))
        low, high = bar(1.0, "time", guess.reach, found.time_bar)
        held.append(low <= math.exp(own) <= high)
    return Outcome(before, after, held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--known", type=int, default=3)
    parser.add_argument("--draws", type=int, default=2)
    arguments = parser.parse_args()
    announce()
    by_source: dict[str, list[tuple[Case, AskedStep]]] = {}
    kept, _ = cases()
    for case in kept:
        if case.seconds is not None:
            try:
                by_source.setdefault(case.source, []).append((case, asked(case)))
            except PlanError:
                continue
    rng = random.Random(0)
    medians = []
    print("source  rows  before  after  bars hold")
    for source, rows in sorted(by_source.items()):
        if len(rows) < FEWEST:
            continue
        some = rng.sample(rows, min(MOST, len(rows)))
        draws = [outcome(some, arguments.known, rng) for _ in range(arguments.draws)]
        before = statistics.median(value for one in draws for value in one.before)
        after = statistics.median(value for one in draws for value in one.after)
        held = statistics.mean(value for one in draws for value in one.held)
        medians.append((before, after, held))
        print(f"{source:6} {len(rows):5} {before:7.1%} {after:6.1%} {held:9.0%}", flush=True)
    before, after, held = (statistics.median(column) for column in zip(*medians, strict=True))
    mean = statistics.mean(one[2] for one in medians)
    print(f"median {len(medians):5} {before:7.1%} {after:6.1%} {mean:9.0%}")


if __name__ == "__main__":
    main()
