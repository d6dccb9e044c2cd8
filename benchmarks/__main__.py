"""One page in ten minutes: where plait stands on this machine beside torch's own.

    python -m benchmarks [--ranks 2 4] [--seconds 560] [--json FILE [--docs]]
    python -m benchmarks --memory-only
    python -m benchmarks --times-only

Processor and versions, step times as ratios to DDP with their quartiles, memory and bytes. Systems
of a table live in the same ranks and take turns. `python -m benchmarks.page.commits A B` compares
two commits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.page.carried import PAGE, carry, commit_here
from benchmarks.page.page import make_memory_page, make_page
from benchmarks.page.systems import PLANS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--families", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--seconds", type=float, default=560.0, help="of all tables together")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    parser.add_argument("--docs", action="store_true", help="put the rows into docs/measured.md")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--memory-only", action="store_true", help="print memory and bytes alone")
    only.add_argument("--times-only", action="store_true", help="leave memory and bytes out")
    arguments = parser.parse_args()
    if arguments.memory_only:
        make_memory_page()
        return
    if arguments.docs and arguments.json is None:
        parser.error("--docs needs --json FILE, where the rows are kept")
    if arguments.docs and arguments.times_only:
        parser.error("--docs puts memory into the page too; leave --times-only out")
    with_memory = not arguments.times_only
    make_page(
        arguments.ranks,
        arguments.families,
        arguments.seconds,
        arguments.json,
        with_memory=with_memory,
    )
    if arguments.docs:
        carry(arguments.json, PAGE, commit_here())


if __name__ == "__main__":
    main()
