"""How long does one operation of an axis take, against torch.distributed on Gloo? Interleaved,
medians, one table.

Run: python -m benchmarks.collectives.bench [--ranks 2 4] [--megabytes 1 16] [--repeats 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.machine import announce
from plait.comm import init
from plait.mesh import Mesh

CPU = torch.device("cpu")
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
REDUCE_SCATTER = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # renamed in torch 2.13
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def native_calls(numel: int, n: int) -> dict[str, Callable[[], object]]:
    full = torch.ones(numel)
    other = torch.ones(numel)
    part = torch.ones(numel // n)
    return {
        "all_reduce": lambda: dist.all_reduce(full),
        "reduce_scatter": lambda: REDUCE_SCATTER(part, full),
        "all_gather": lambda: ALL_GATHER(full, part),
        "all_to_all": lambda: dist.all_to_all_single(other, full),
    }


def axis_calls(axis, numel: int, own_memory: bool) -> dict[str, Callable[[], object]]:
    """`own_memory`: tensors from `axis.empty`, in place; otherwise ordinary ones."""
    if own_memory:
        full = axis.empty(numel, torch.float32, CPU).fill_(1)
        other = axis.empty(numel, torch.float32, CPU).fill_(1)
        part = full[axis.rank * (numel // axis.size) :][: numel // axis.size]
    else:
        full = torch.ones(numel)
        other = torch.ones(numel)
        part = torch.ones(numel // axis.size)
    return {
        "all_reduce": lambda: axis.all_reduce(full).wait(),
        "reduce_scatter": lambda: axis.reduce_scatter(part, full).wait(),
        "all_gather": lambda: axis.all_gather(full, part).wait(),
        "all_to_all": lambda: axis.all_to_all(other, full).wait(),
    }


def measure(rank: int, n: int, folder: str, sizes: list[int], repeats: int, answers) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", n), rank=rank, world_size=n
    )
    gloo = init(Mesh(dp=n), backend="gloo")
    shared = init(Mesh(dp=n), backend="shared")
    for num_bytes in sizes:
        numel = num_bytes // 4
        calls_in_a_row = max(2, min(20, (4 << 20) // num_bytes))
        ways = {
            "torch on Gloo": native_calls(numel, n),
            "axis on Gloo": axis_calls(gloo.axis("dp"), numel, False),
            "axis, shared, ordinary tensors": axis_calls(shared.axis("dp"), numel, False),
            "axis, shared, own memory": axis_calls(shared.axis("dp"), numel, True),
        }
        for op in OPS:
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for repeat in range(repeats + 2):
                for way, calls in ways.items():
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(calls_in_a_row):
                        calls[op]()
                    if repeat >= 2:
                        seconds[way].append((time.perf_counter() - start) / calls_in_a_row)
            if rank == 0:
                answers.put(
                    (
                        n,
                        num_bytes,
                        op,
                        {way: statistics.median(times) for way, times in seconds.items()},
                    )
                )
    shared.close()
    gloo.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    announce()
    sizes = [int(m * (1 << 20)) for m in given.megabytes]
    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}, float32, one thread a rank; "
        "milliseconds a call, medians of "
        f"{given.repeats} interleaved rounds of up to 20 calls in a row, rank 0\n"
    )
    answers = mp.get_context("spawn").SimpleQueue()
    header = False
    for n in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (n, folder, sizes, given.repeats, answers), nprocs=n)
        while not answers.empty():
            ranks, num_bytes, op, medians = answers.get()
            if not header:
                print("| ranks | MB | operation | " + " | ".join(medians) + " |")
                print("|---|---|---|" + "---|" * len(medians))
                header = True
            cells = " | ".join(f"{1e3 * seconds:.2f}" for seconds in medians.values())
            print(f"| {ranks} | {num_bytes / (1 << 20):g} | {op} | {cells} |")


if __name__ == "__main__":
    main()
