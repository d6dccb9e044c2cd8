"""`python -m tests.parity.generator --plans 1000`: run that many random cells and write
docs/parity.md.

What has run is kept in a file, one line a cell, so that a long run can be done in slices and goes
on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.helpers.pool import Pool
from tests.parity.generator.cell import Cell
from tests.parity.generator.draw import cells
from tests.parity.generator.report import Row, report
from tests.parity.generator.run import judge
from tests.parity.generator.shrink import shrink


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.generator", description=__doc__)
    parser.add_argument("--plans", type=int, default=1000, help="how many cells (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the table (default: 0)")
    parser.add_argument(
        "--at-most-seconds",
        type=float,
        default=float("inf"),
        help="stop then; the next call goes on",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("runs/parity.jsonl"),
        help="one line a cell that has run",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/parity.md"), help="the report")
    parser.add_argument(
        "--note", default="", help="a sentence for the report: of which version, on what machine"
    )
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        help="numbers of cells to run now, whether they have run or not",
    )
    parser.add_argument("--cell", help="one cell, as the JSON of a report, to run now")
    return parser.parse_args()


def main() -> int:
    """0 when no cell failed."""
    given = arguments()
    pool = Pool()
    try:
        if given.cell is not None:
            print(judge(pool.run, Cell.parse(given.cell)))
            return 0
        rows = _rows(given, pool)
    finally:
        pool.close()
    given.out.write_text(report(rows, given.plans, given.seed, given.note))
    failed = [row for row in rows if row.verdict.status == "failed"]
    print(f"{len(rows)} of {given.plans} cells have run, {len(failed)} failed; {given.out}")
    return 1 if failed else 0


def _rows(given: argparse.Namespace, pool: Pool) -> list[Row]:
    given.results.parent.mkdir(parents=True, exist_ok=True)
    rows = {row.number: row for row in _earlier(given.results) if row.seed == given.seed}
    deadline = time.monotonic() + given.at_most_seconds
    for number, cell in enumerate(cells(given.plans, given.seed)):
        wanted = (
            number in given.only if given.only else number not in rows or rows[number].cell != cell
        )
        if not wanted or time.monotonic() > deadline:
            continue
        verdict = judge(pool.run, cell)
        smallest = None
        if verdict.status == "failed":
            print(
                f"{number}: {cell}\n{verdict.kind} {verdict.error:.2e} {verdict.worst} "
                f"{verdict.message}",
                file=sys.stderr,
            )
            smallest = shrink(cell, lambda other: judge(pool.run, other).status == "failed")
            print(f"smallest: {smallest}", file=sys.stderr, flush=True)
        rows[number] = Row(number, given.seed, cell, verdict, smallest)
        with given.results.open("a") as file:
            file.write(json.dumps(asdict(rows[number])) + "\n")
    return [rows[number] for number in sorted(rows) if number < given.plans]


def _earlier(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [Row.of(json.loads(line)) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
