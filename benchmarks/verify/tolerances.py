"""Where false alarms and misses lie: `python -m benchmarks.verify.tolerances [--right N]`.

Right steps and planted faults run in this process, in each precision, and are judged as
`plait verify --step` judges. A right step that is called wrong is a false alarm; a fault that is
called right is a miss.
"""

from __future__ import annotations

import argparse
import json
import warnings

import torch

from benchmarks.machine import announce
from benchmarks.verify.steps import FAULTS, Cell, drawn, faulty, functions
from plait.verify import Report
from plait.verify.outside.source import FunctionSource
from plait.verify.outside.task import DTYPES, Trial
from plait.verify.outside.trial import alone


def judged(cell: Cell, dtype: str) -> Report:
    """The report on one step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return alone(functions(cell), Trial(FunctionSource(), 3, dtype))


def nearest(report: Report) -> float:
    """The largest error, in units of what passes."""
    return max(one.error / report.limit_of(one) for one in report.differences)


def row(dtype: str, first: int, right: int, each: int) -> dict[str, object]:
    """The counts of one precision, of the cells from `first` on."""
    reports = {number: judged(drawn(number), dtype) for number in range(first, first + right)}
    alarms = [f"{number}: {drawn(number)}" for number, one in reports.items() if not one.ok]
    shares = sorted(nearest(one) for one in reports.values())
    missed = [
        f"{name}, {number}"
        for name in FAULTS
        for number in range(first, first + each)
        if judged(faulty(name, number), dtype).ok
    ]
    return {
        "dtype": dtype,
        "right": right,
        "false alarms": alarms,
        "median": shares[len(shares) // 2],
        "largest": shares[-1],
        "faults": len(FAULTS) * each,
        "missed": missed,
    }


def main() -> None:
    """One line a precision; the names of what was judged wrongly follow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--right", type=int, default=200, help="right steps")
    parser.add_argument("--first", type=int, default=0, help="the number of the first step")
    parser.add_argument("--each", type=int, default=4, help="steps with each fault")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    announce()
    for dtype in arguments.dtype or DTYPES:
        found = row(dtype, arguments.first, arguments.right, arguments.each)
        if arguments.json:
            print(json.dumps(found), flush=True)
            continue
        print(
            f"| {dtype} | {len(found['false alarms'])} of {found['right']} | "
            f"{found['median']:.2f} | {found['largest']:.2f} | "
            f"{len(found['missed'])} of {found['faults']} |",
            flush=True,
        )
        for name in (*found["false alarms"], *found["missed"]):
            print(f"    {name}", flush=True)


if __name__ == "__main__":
    main()
