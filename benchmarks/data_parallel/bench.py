"""Step time, memory and traffic of data parallelism: plait's strategies beside torch's and
DeepSpeed's.

    python benchmarks/data_parallel/bench.py [--ranks 2 4] [--cases compute communication] [--rounds
    15] [--only WORD ...]

All systems live in the same ranks and take turns, one step each round, so that a change of the
machine's speed meets all alike; the table shows medians and the ratio to torch DDP, taken round by
round. Memory and traffic are taken in ranks of their own.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.data_parallel.systems import CASES, systems
from benchmarks.machine import announce
from benchmarks.spread import quartile_text
from plait import comm
from plait.launcher import launch
from plait.mesh import Mesh

BASE = "torch DDP"
NUM_COUNTED = 2  # steps over which traffic is taken


def measure_time(
    case_name: str, names: Sequence[str], rounds: int, size: int
) -> dict[str, list[float]]:
    """Seconds of each round, by system. Runs in every rank."""
    torch.set_num_threads(1)
    world = comm.init(Mesh(dp=size))
    case = CASES[case_name]
    makers = systems(size)
    batch = case.batch(world.rank, size)
    steps = {name: makers[name](case, world) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.disable()
    for round_index in range(rounds + 2):
        for name, step in steps.items():
            world.barrier()
            began = time.perf_counter()
            step(*batch)
            world.barrier()
            if round_index >= 2:
                seconds[name].append(time.perf_counter() - began)
        gc.collect()
    return seconds


@dataclass(frozen=True)
class Footprint:
    """What one system takes of a rank: peak bytes beyond those of the process before the model, and
    bytes sent a step.

    `shared_bytes` counts a page that ranks share in shares (proportional set size),
    `resident_bytes` counts it whole in each rank that touched it. Peers' traffic is what the
    loopback interface carried, plait's is what its ledger counted (its ranks on one machine
    exchange through memory that they share, which no interface sees).
    """

    resident_bytes: int
    shared_bytes: int
    sent_bytes: float


def measure_footprint(case_name: str, name: str, size: int) -> Footprint:
    """Runs in every rank of a launch of its own."""
    torch.set_num_threads(1)
    world = comm.init(Mesh(dp=size))
    case = CASES[case_name]
    batch = case.batch(world.rank, size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with PeakOfShares() as shares:
        step = systems(size)[name](case, world)
        for _ in range(3):
            step(*batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    world.barrier()
    carried = loopback_bytes()
    counted = world.ledger.copy()
    world.barrier()
    for _ in range(NUM_COUNTED):
        step(*batch)
    world.barrier()
    own = sum(world.ledger.since(counted).by_axis().values())
    sent = own if name.startswith("plait") else (loopback_bytes() - carried) / size
    world.barrier()
    return Footprint(peak - before, shares.peak_bytes, sent / NUM_COUNTED)


class PeakOfShares:
    """The largest proportional set size seen while the block runs, beyond that at its start;
    sampled by a thread.
    """

    def __enter__(self) -> PeakOfShares:
        self._start = self._peak = proportional_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak_bytes = self._peak - self._start

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self._peak = max(self._peak, proportional_bytes())


def proportional_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def loopback_bytes() -> int:
    """Bytes that the loopback interface has sent since the machine started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(
        int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")
    )


def installed(name: str) -> bool:
    if name.startswith("DeepSpeed"):
        try:
            import deepspeed  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            return False
    return True


def table(case_name: str, size: int, rounds: int, only: Sequence[str], footprint: bool) -> None:
    names = [
        name
        for name in systems(size)
        if installed(name) and (name == BASE or not only or any(w in name for w in only))
    ]
    seconds = launch(measure_time, case_name, names, rounds, size, nproc=size)[0]
    print(f"\n### {CASES[case_name].why}; {size} ranks, one thread each, {rounds} rounds\n")
    print(
        "| system | step ms (median) | ratio to DDP (median, [quartiles]) | peak MB: resident, "
        "shared | MB sent |"
    )
    print("|---|---|---|---|---|")
    for name in names:
        ratios = [own / base for own, base in zip(seconds[name], seconds[BASE], strict=True)]
        ms = statistics.median(seconds[name]) * 1e3
        rest = (
            footprint_cells(launch(measure_footprint, case_name, name, size, nproc=size))
            if footprint
            else " | "
        )
        print(f"| {name} | {ms:.1f} | {quartile_text(ratios, '.3f')} | {rest} |", flush=True)


def footprint_cells(ranks: Sequence[Footprint]) -> str:
    """Memory of the rank that takes most, and the mean of what ranks send."""
    resident = max(own.resident_bytes for own in ranks)
    shared = max(own.shared_bytes for own in ranks)
    sent = statistics.mean(own.sent_bytes for own in ranks)
    return f"{resident / 1e6:.0f}, {shared / 1e6:.0f} | {sent / 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", nargs="+", default=[], help="systems whose name holds one of these words"
    )
    parser.add_argument("--no-footprint", action="store_true")
    args = parser.parse_args()
    announce()
    for case_name in args.cases:
        for size in args.ranks:
            table(case_name, size, args.rounds, args.only, not args.no_footprint)


if __name__ == "__main__":
    main()
