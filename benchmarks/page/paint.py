"""Milliseconds until a browser shows the page of plans: `python -m benchmarks.page.paint`.

One server, as `plait explore` starts it, and a headless Chromium that has never seen the page,
several times. The browser itself tells its first paint with content (its paint timing). The first
plan is there when the table has a row.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import pytest
from tests.browser.chromium import chromium

from benchmarks.machine import announce
from benchmarks.page.explore import CLUSTER, MODEL

AIM_MILLISECONDS: Final = 3000
PAINT: Final = """() => new Promise((resolve) => {
  new PerformanceObserver((list) => {
    for (const one of list.getEntries())
      if (one.name === "first-contentful-paint") resolve(one.startTime);
  }).observe({ type: "paint", buffered: true });
})"""
FIRST_PLAN: Final = "#plans tbody tr"


@dataclass(frozen=True)
class Opening:
    """One opening of the page: milliseconds from the call of its address."""

    paint: float
    first_plan: float


def openings(times: int) -> tuple[float, list[Opening]]:
    """Milliseconds from the command to the address on stdout, and the openings after it."""
    command = [sys.executable, "-m", "plait", "explore", MODEL, "--cluster", CLUSTER]
    with chromium() as browser:
        began = time.perf_counter()
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            started = (time.perf_counter() - began) * 1e3
            return started, [opening(browser, url) for _ in range(times)]
        finally:
            server.terminate()
            server.communicate()


def opening(browser: Any, url: str) -> Opening:
    """The page in a new profile, which has nothing in its cache."""
    context = browser.new_context(viewport={"width": 1280, "height": 690})
    try:
        page = context.new_page()
        page.goto(url, wait_until="commit")
        paint = page.evaluate(PAINT)
        page.wait_for_selector(FIRST_PLAN)
        return Opening(paint, page.evaluate("performance.now()"))
    finally:
        context.close()


def text(started: float, found: Sequence[Opening]) -> str:
    """The table, and how many openings missed the aim."""
    lines = ["| opening | first paint, ms | first plan, ms |", "|---|---|---|"]
    lines += [f"| {n} | {one.paint:.0f} | {one.first_plan:.0f} |" for n, one in enumerate(found, 1)]
    for name, numbers in (
        ("first paint", [one.paint for one in found]),
        ("first plan", [one.first_plan for one in found]),
    ):
        late = sum(number > AIM_MILLISECONDS for number in numbers)
        lines.append(
            f"\n{name}: median {median(numbers):.0f} ms, worst {max(numbers):.0f} ms; "
            f"{late} of {len(numbers)} above {AIM_MILLISECONDS} ms"
        )
    return "\n".join([*lines, f"\nfrom the command to the address: {started:.0f} ms"])


def main() -> None:
    """Print the processor's name and the table, or why there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=7, help="how often the page is opened")
    arguments = parser.parse_args()
    announce()
    try:
        found = openings(arguments.times)
    except pytest.skip.Exception as why:
        print(f"not measured: {why}")
        return
    print(f"{MODEL} on {CLUSTER}\n\n{text(*found)}")


if __name__ == "__main__":
    main()
