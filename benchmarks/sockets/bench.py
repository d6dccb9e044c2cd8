"""Step times through a real link: two ranks in two network namespaces, shaped to 1 and 10 Gbit/s.

    python -m benchmarks.sockets.bench [--gigabits 1 10] [--seconds 480] [--families data ...]

Every byte between the ranks goes through the link: plait runs with `transport = "sockets"`, its
peers over Gloo. Systems of a table take turns in the same ranks, and ratios are to torch DDP. Where
there is no right to make namespaces the script says so and ends well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import announce
from benchmarks.page.measure import Group
from benchmarks.page.page import Row, text
from benchmarks.page.systems import CASES, PLANS, peers_of, plans_of
from benchmarks.sockets.link import End, link, why_not

RANKS = 2
PORT = 29631
RANK = "from benchmarks.sockets.rank import main; main()"


def group_of(case: str, family: str, seconds: float) -> Group:
    """The systems of a family, plait's through sockets with torch's product."""
    plans = plans_of(family, RANKS, CASES[case])
    own = [f"{plan} | sockets" for plan in plans]
    return Group(case, family, RANKS, (*peers_of(family, CASES[case]), *own), seconds)


def ran(group: Group, ends: tuple[End, End]) -> dict[str, object]:
    """What the two ranks measured, each in its namespace."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "answer.json")
        question = json.dumps({"group": asdict(group)})
        words = (sys.executable, "-c", RANK, question, str(out))
        ranks = [
            subprocess.Popen(end.command(*words), env={**os.environ, **_variables(rank, end, ends)})
            for rank, end in enumerate(ends)
        ]
        codes = [rank.wait(timeout=2 * group.limit_seconds + 180) for rank in ranks]
        if any(codes):
            return {"rows": [], "failed": {"ranks": f"exit codes {codes}"}, "carried": {}}
        answer: dict[str, object] = json.loads(out.read_text())
        return answer


def _variables(rank: int, end: End, ends: tuple[End, End]) -> dict[str, str]:
    """The variables of torchrun, and the interface that Gloo listens on."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": ends[0].address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": end.interface,
        "OMP_NUM_THREADS": "1",
    }


def show(answer: dict[str, object]) -> None:
    """Print the table of a group and the bytes that its link carried."""
    found = answer["rows"]
    assert isinstance(found, list)
    own = [Row(**{**row, "ratio": tuple(row["ratio"])}) for row in found]
    if own:
        print(text(own))
    carried = answer["carried"]
    assert isinstance(carried, dict)
    if carried:
        shown = (f"{name.split(' | ')[0]} {sent / 1e6:.2f}" for name, sent in carried.items())
        print("MB through the fuller end of the link, a step: " + ", ".join(shown))
    failed = answer["failed"]
    assert isinstance(failed, dict)
    for name, why in failed.items():
        print(f"{name} failed: {why}")
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabits", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--seconds", type=float, default=480.0, help="of all tables together")
    parser.add_argument("--families", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args(words)
    announce()
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    tables = len(arguments.gigabits) * len(arguments.families) * len(arguments.cases)
    each = 0.7 * arguments.seconds / tables
    for gigabits in arguments.gigabits:
        print(f"\n## A link of {gigabits} Gbit/s")
        with link(gigabits) as ends:
            for family in arguments.families:
                for case in arguments.cases:
                    show(ran(group_of(case, family, each), ends))


if __name__ == "__main__":
    main()
