"""Which of torch's two libraries multiplies float32 quicker here, and by how much?

Both take turns on the same matrices, A B A B; a cell is the median over the rounds, with quartiles
of the ratio taken round by round.

Run: python -m benchmarks.products.bench [--rounds 9] [--threads 1] [--classes N]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

import torch

from benchmarks.machine import announce
from plait.cluster.products import CLASSES, ProductClass
from plait.products import operations
from plait.products.measure import Shape, Times, measure, shapes_of, time_product

HEAD = "| product | rows x in x out | torch, us | oneDNN, us | oneDNN / torch | steady | choice |"


def row(one: ProductClass, shape: Shape, times: Times, choice: str) -> str:
    """A line of the table."""
    low, middle, high = times.ratio
    steady = "yes" if times.is_steady else "no"
    sizes = " x ".join(str(size) for size in shape)
    own = f"{median(times.torch) * 1e6:.0f} | {median(times.onednn) * 1e6:.0f}"
    ratio = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
    return f"| {one.kind} | {sizes} | {own} | {ratio} | {steady} | {choice} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--classes", type=int, default=len(CLASSES), help="the first so many")
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    announce()
    if not operations():
        print("torch was built without oneDNN here: its own products everywhere")
        return
    classes = CLASSES[: arguments.classes]
    timed: dict[tuple[ProductClass, Shape], Times] = {
        (one, shape): time_product(one, shape, rounds=arguments.rounds)
        for one in classes
        for shape in shapes_of(one)
    }
    found = measure(lambda one, shape: timed[one, shape], classes)
    print(f"{HEAD}\n{'|---' * HEAD.count(' | ')}|---|")
    for (one, shape), times in timed.items():
        choice = "oneDNN" if one in found.table.onednn else "torch"
        print(row(one, shape, times, choice))
    busy = "" if found.is_steady else "; the machine was busy, so nothing would be kept"
    print(f"\n{arguments.rounds} rounds, threads: {arguments.threads}{busy}")


if __name__ == "__main__":
    main()
