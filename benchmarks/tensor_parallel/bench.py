"""Step time of tensor parallelism: plait's 1D beside torch's DTensor and DDP, on one GPT.

    python -m benchmarks.tensor_parallel.bench [--ranks 2] [--rounds 15] [--seconds 240] [--only
    WORD ...]

All systems live in the same ranks and take turns, one step each round, so that a change of the
machine's speed meets all alike; the table shows medians and the ratio to torch DDP, taken round by
round. A system that fails to start is named with its error. No round begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.machine import announce
from benchmarks.spread import quartile_text
from benchmarks.tensor_parallel.systems import systems
from plait import comm
from plait.launcher import launch
from plait.mesh import Mesh

BASE = "torch DDP"


def measure(
    names: Sequence[str], rounds: int, size: int, limit_seconds: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each round by system, and what went wrong. Runs in every rank."""
    torch.set_num_threads(1)
    start = time.monotonic()
    makers = systems(size)
    steps = {}
    failed = {}
    for name in names:
        world = comm.init(Mesh(tp=size) if name.startswith("plait") else Mesh(dp=size))
        try:
            steps[name] = makers[name](world)
            steps[name]()
        except Exception as error:  # named in the table
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            steps.pop(name, None)
    everyone = comm.init(Mesh(dp=size))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    for round_index in range(rounds + 2):
        if (
            round_index > 4
            and max(everyone.axis("world").gather_objects(time.monotonic() - start)) > limit_seconds
        ):
            break
        for name, step in steps.items():
            everyone.barrier()
            began = time.perf_counter()
            step()
            everyone.barrier()
            if round_index >= 2:
                seconds[name].append(time.perf_counter() - began)
        gc.collect()
    return seconds, failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument(
        "--only", nargs="+", default=[], help="systems whose name holds one of these words"
    )
    args = parser.parse_args()
    announce()
    names = [
        name
        for name in systems(args.ranks)
        if name == BASE or not args.only or any(w in name for w in args.only)
    ]
    seconds, failed = launch(
        measure, names, args.rounds, args.ranks, args.seconds, nproc=args.ranks
    )[0]
    print(
        f"\n### 8 layers, width 256, sequence 128, batch 16, vocabulary 1024; {args.ranks} "
        "ranks, one thread each, "
        f"{len(seconds[BASE])} rounds\n"
    )
    print("| system | step ms (median) | ratio to DDP (median, [quartiles]) |")
    print("|---|---|---|")
    for name, own in seconds.items():
        ratios = [mine / base for mine, base in zip(own, seconds[BASE], strict=True)]
        milliseconds = statistics.median(own) * 1e3
        print(f"| {name} | {milliseconds:.1f} | {quartile_text(ratios, '.3f')} |")
    for name, why in failed.items():
        print(f"| {name} | failed | {why} |")


if __name__ == "__main__":
    main()
