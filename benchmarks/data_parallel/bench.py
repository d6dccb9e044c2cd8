"""Step time and memory of data parallelism: plait's strategies beside torch's and DeepSpeed's.

    python benchmarks/data_parallel/bench.py [--ranks 2 4] [--cases compute communication] [--rounds 15] [--only WORD ...]

All systems live in the same ranks and take turns, one step each round, so that a change of the machine's speed meets all
alike; the table shows medians and the ratio to torch DDP, taken round by round. Memory is measured in ranks of their own.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.data_parallel.systems import CASES, systems
from plait import comm
from plait.launcher import launch
from plait.mesh import Mesh

BASE = "torch DDP"


def measure_time(case_name: str, names: Sequence[str], rounds: int, size: int) -> dict[str, list[float]]:
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


def measure_memory(case_name: str, name: str, size: int) -> tuple[float, float]:
    """(peak resident bytes beyond those before the model, of one rank; final value unused). Runs in every rank."""
    torch.set_num_threads(1)
    world = comm.init(Mesh(dp=size))
    case = CASES[case_name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step = systems(size)[name](case, world)
    for _ in range(4):
        step(*case.batch(world.rank, size))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    world.barrier()
    return peak - before, 0.0


def installed(name: str) -> bool:
    if name.startswith("DeepSpeed"):
        try:
            import deepspeed  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            return False
    return True


def table(case_name: str, size: int, rounds: int, only: Sequence[str], memory: bool) -> None:
    names = [name for name in systems(size) if installed(name) and (name == BASE or not only or any(w in name for w in only))]
    seconds = launch(measure_time, case_name, names, rounds, size, nproc=size)[0]
    print(f"\n### {CASES[case_name].why}; {size} ranks, one thread each, {rounds} rounds\n")
    print("| system | step ms (median) | ratio to DDP (median, [quartiles]) | peak memory, MB a rank |")
    print("|---|---|---|---|")
    for name in names:
        ratios = [own / base for own, base in zip(seconds[name], seconds[BASE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        peak = "" if not memory else f"{launch(measure_memory, case_name, name, size, nproc=size)[0][0] / 1e6:.0f}"
        ms = statistics.median(seconds[name]) * 1e3
        print(f"| {name} | {ms:.1f} | {middle:.3f} [{low:.3f}, {high:.3f}] | {peak} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[], help="systems whose name holds one of these words")
    parser.add_argument("--no-memory", action="store_true")
    args = parser.parse_args()
    for case_name in args.cases:
        for size in args.ranks:
            table(case_name, size, args.rounds, args.only, not args.no_memory)


if __name__ == "__main__":
    main()
