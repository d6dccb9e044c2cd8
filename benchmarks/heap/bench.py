"""What do the C library's lists of small pieces cost a step? Commands take turns, without the
lists, as plait's launcher has it, and with them.

    python -m benchmarks.heap.bench [--turns 6] [--plans dp2 dp2:zero3 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping

from benchmarks.heap.one import HEAP_CASES
from benchmarks.machine import announce
from benchmarks.page.systems import micro_batches
from benchmarks.spread import quartile_text, quartiles
from plait.launcher.allocator import CHOICES, LARGEST_KEPT_BYTES, TUNABLES

PLANS = ("dp2", "dp2:ring", "dp2:zero1", "dp2:zero3", "tp2", "pp2:1f1b mb{m}")
NUM_STEPS = {"wide batch": 8, "few tokens": 12, "small": 200}
WITH_LISTS = {
    TUNABLES: f"glibc.malloc.mmap_threshold={LARGEST_KEPT_BYTES}:"
    f"glibc.malloc.trim_threshold={1 << 40}"
}
"""The other choices of the launcher. One of the environment turns those of the launcher off."""


def run(system: str, case: str, chosen: Mapping[str, str]) -> tuple[float, float]:
    """Seconds of a step and peak MB of the fullest rank, in processes of their own."""
    module = "benchmarks.heap.one"
    inherited = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-m", module, system, case, str(NUM_STEPS[case])],
        env={**inherited, **chosen},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{system}: exit {done.returncode}\n{done.stderr[-2000:]}")
    seconds, peak_bytes = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds, peak_bytes / 1e6


def table(case: str, plans: list[str], turns: int) -> None:
    """Print the rows of a case."""
    ratios: dict[str, list[float]] = defaultdict(list)
    megabytes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    named = [plan.format(m=micro_batches(HEAP_CASES[case])) for plan in plans]
    for _ in range(turns):
        for plan in named:
            system = f"{plan} | shared memory"
            seconds, peak = run(system, case, {})
            seconds_with, peak_with = run(system, case, WITH_LISTS)
            ratios[plan].append(seconds / seconds_with)
            megabytes[plan].append((peak, peak_with))
    print(f"\n### {HEAP_CASES[case].why}\n")
    print("| plan | time, without / with lists | resident MB without | with |\n|---|---|---|---|")
    for plan in named:
        without, having = zip(*megabytes[plan], strict=True)
        cells = f"{quartiles(without)[1]:.0f} | {quartiles(having)[1]:.0f}"
        print(f"| `{plan}` | {quartile_text(ratios[plan])} | {cells} |")
    print(f"\n{turns} turns.", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--cases", nargs="+", choices=HEAP_CASES, default=list(HEAP_CASES))
    asked = parser.parse_args()
    announce()
    for case in asked.cases:
        table(case, asked.plans, asked.turns)


if __name__ == "__main__":
    main()
