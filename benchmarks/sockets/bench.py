"""Step times through a real link: two ranks in two network namespaces, shaped to 1 and 10 Gbit/s.

    python -m benchmarks.sockets.bench [--gigabits 1 10] [--seconds 1500] [--families data ...]
    python -m benchmarks.sockets.bench --hosts --families data tensor

Families are data, tensor, pipeline, context and experts. Every byte between the ranks goes through
the link: plait runs with `transport = "sockets"`, its peers over Gloo. Tensor and pipeline plans
also send their activations in bf16 (`messages = "bf16"`).

With `--hosts` each namespace is a host of two ranks. There plait runs over sockets alone, and with
the memory of each host too; one plan at a time beside DDP, for memory. Systems of a table take
turns in the same ranks, and ratios are to torch DDP. Where there is no right to make namespaces the
script says so and ends well.
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
from benchmarks.page.systems import (
    DDP,
    IN_HALVES,
    LINK_CASES,
    LINK_PEERS,
    LINK_PLANS,
    cases_of,
    peers_of,
    plans_of,
)
from benchmarks.sockets.link import End, link, why_not

NUM_ENDS = 2
RANKS_A_HOST = 2  # of `--hosts`
SENDS_ACTIVATIONS = ("tensor", "pipeline")
PORT = 29631
PATIENCE_SECONDS = 300.0
RANK = "from benchmarks.sockets.rank import main; main()"


def groups_of(case: str, family: str, seconds: float) -> list[Group]:
    """The systems of a family, plait's through sockets with torch's product."""
    plans = plans_of(family, NUM_ENDS, LINK_CASES[case], LINK_PLANS)
    titles = ["sockets"]
    if family in SENDS_ACTIVATIONS:
        titles.append(IN_HALVES.title)
    own = [f"{plan} | {title}" for plan in plans for title in titles]
    return [
        Group(
            case, family, NUM_ENDS, (*peers_of(family, LINK_CASES[case], LINK_PEERS), *own), seconds
        )
    ]


def groups_of_hosts(case: str, family: str, seconds: float) -> list[Group]:
    """Each plan over sockets and by hosts, beside DDP."""
    size = NUM_ENDS * RANKS_A_HOST
    plans = plans_of(family, size, LINK_CASES[case], LINK_PLANS)
    ways = [(DDP, f"{plan} | sockets", f"{plan} | shared memory") for plan in plans]
    return [Group(case, family, size, systems, seconds / len(plans)) for systems in ways]


def ran(group: Group, ends: tuple[End, End]) -> dict[str, object]:
    """What the ranks measured, each in the namespace of its end."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "answer.json")
        question = json.dumps({"group": asdict(group)})
        words = (sys.executable, "-c", RANK, question, str(out))
        ranks = []
        for number in range(group.size):
            end = ends[number * NUM_ENDS // group.size]
            variables = {**os.environ, **_variables(number, group.size, end, ends)}
            ranks.append(subprocess.Popen(end.command_of_host(*words), env=variables))
        try:
            codes = [
                rank.wait(timeout=2 * group.limit_seconds + PATIENCE_SECONDS) for rank in ranks
            ]
        except subprocess.TimeoutExpired:
            return _failed("no answer in time: is the machine quiet?")
        finally:
            for rank in ranks:
                rank.kill()  # nothing, where it has ended
        if any(codes):
            return _failed(f"exit codes {codes}")
        answer: dict[str, object] = json.loads(out.read_text())
        return answer


def _failed(why: str) -> dict[str, object]:
    return {"rows": [], "failed": {"ranks": why}, "carried": {}}


def _variables(rank: int, size: int, end: End, ends: tuple[End, End]) -> dict[str, str]:
    """The variables of torchrun, and the interface that Gloo listens on."""
    local_size = size // NUM_ENDS
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_size),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local_size),
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
        shown = (f"{name} {sent / 1e6:.2f}" for name, sent in carried.items())
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
    parser.add_argument("--seconds", type=float, default=1500.0, help="of all tables together")
    parser.add_argument("--families", nargs="+", default=list(LINK_PLANS), choices=list(LINK_PLANS))
    parser.add_argument("--cases", nargs="+", default=list(LINK_CASES), choices=list(LINK_CASES))
    parser.add_argument("--hosts", action="store_true", help="two hosts of two ranks each")
    arguments = parser.parse_args(words)
    announce()
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    tables = [
        (family, case)
        for family in arguments.families
        for case in cases_of(family)
        if case in arguments.cases
    ]
    if not tables:
        parser.error(f"no case of {arguments.families} is among {arguments.cases}")
    each = 0.7 * arguments.seconds / (len(arguments.gigabits) * len(tables))
    groups_of_way = groups_of_hosts if arguments.hosts else groups_of
    for gigabits in arguments.gigabits:
        print(f"\n## A link of {gigabits} Gbit/s")
        with link(gigabits) as ends:
            for family, case in tables:
                for group in groups_of_way(case, family, each):
                    show(ran(group, ends))


if __name__ == "__main__":
    main()
