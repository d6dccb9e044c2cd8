"""One system in ranks of its own: step time and peak memory, as a last line of JSON.

python -m benchmarks.heap.one SYSTEM CASE NUM_STEPS
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time

from benchmarks.gpt import Case
from benchmarks.machine import announce
from benchmarks.page.systems import CASES, one_thread, start
from plait import comm
from plait.cluster.products import ProductTable
from plait.launcher import launch
from plait.mesh import Mesh

SIZE = 2
NUM_WARM = 3  # steps until the optimizer has its state and the heap its size
SMALL = "small"
HEAP_CASES = {**CASES, SMALL: Case(SMALL, "2 layers x 128, batch 2 x 32", 2, 128, 32, 2)}


def measure(system: str, case: str, num_steps: int) -> tuple[float, int]:
    """The median seconds of a step, and the peak resident bytes. Runs in every rank."""
    one_thread()
    world = comm.init(Mesh(dp=SIZE), backend="gloo")
    step = start(system, HEAP_CASES[case], SIZE, ProductTable(frozenset()))
    taken = []
    for _ in range(NUM_WARM + num_steps):
        world.barrier()
        started = time.perf_counter()
        step()
        world.barrier()
        taken.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return statistics.median(taken[NUM_WARM:]), peak


def main() -> None:
    system, case, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    announce()
    found = launch(measure, system, case, num_steps, nproc=SIZE)
    seconds, peaks = zip(*found, strict=True)
    print(json.dumps([max(seconds), max(peaks)]), flush=True)


if __name__ == "__main__":
    main()
