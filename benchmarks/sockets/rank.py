"""One rank inside a namespace: systems by turns, and the bytes that the link carried.

Started by `benchmarks.sockets.bench`, which sets torchrun's variables.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.page.measure import Group, measure_steps
from benchmarks.page.page import rows
from benchmarks.page.systems import LINK_CASES, one_thread, start
from plait import comm
from plait.cluster.products import ProductTable
from plait.mesh import Mesh

NUM_COUNTED = 3


def carried(interface: str) -> int:
    """Bytes that the interface has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    own = next(line for line in lines if line.strip().startswith(f"{interface}:"))
    return int(own.split(":")[1].split()[8])


def carried_by(
    group: Group, table: ProductTable, interface: str, names: Iterable[str]
) -> dict[str, float]:
    """Bytes a step of each system through this rank's end of the link, headers included. `names`:
    the systems that run.
    """
    one_thread()
    everyone = comm.init(Mesh(dp=group.size), backend="gloo")
    found = {}
    for name in names:
        step = start(name, LINK_CASES[group.case], group.size, table)
        step()
        everyone.barrier()
        before = carried(interface)
        for _ in range(NUM_COUNTED):
            step()
        everyone.barrier()
        found[name] = (carried(interface) - before) / NUM_COUNTED
    return found


def main() -> None:
    """Answer the question of the command line."""
    given, out = sys.argv[1:]
    question = json.loads(given)
    group = Group(**{**question["group"], "systems": tuple(question["group"]["systems"])})
    table = ProductTable(frozenset())
    taken = measure_steps(group, table)
    sent = carried_by(group, table, os.environ["GLOO_SOCKET_IFNAME"], taken.seconds)
    everyone = comm.init(Mesh(dp=group.size), backend="gloo")
    ranks = everyone.axis("world").gather_objects(taken)
    bytes_of = everyone.axis("world").gather_objects(sent)
    if everyone.rank == 0:
        answer = {
            "rows": [asdict(row) for row in rows(group, ranks)],
            "failed": taken.failed,
            "carried": {name: max(one[name] for one in bytes_of) for name in sent},
        }
        Path(out).write_text(json.dumps(answer))
    everyone.barrier()
    everyone.close()
