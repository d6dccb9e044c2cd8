"""Whole steps with measured products beside steps with torch's own, and beside torch DDP.

    python -m benchmarks.products.end_to_end [--plans "dp2" "tp2" "pp2:1f1b mb8"] [--rounds 15]

Each plan has two engines: `as it comes` multiplies by the machine's measured table, the other by
torch's own choice. All engines and DDP live in the same two ranks and take turns, one step each
round, so that a change of the machine's speed meets all alike. Ratios are taken round by round. No
round begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.gpt import Case, adamw
from benchmarks.machine import announce
from benchmarks.spread import quartile_text
from benchmarks.tensor_parallel.systems import ddp
from plait import comm
from plait.cache_folder import cache_folder
from plait.cluster.products import CLASSES, ProductTable
from plait.engine.build import Options, build
from plait.engine.choosing import table_here
from plait.launcher import launch
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from plait.plan import Plan

RANKS = 2
WARM = 2  # rounds that do not count
FEWEST = 5  # rounds that run whatever the time
PLANS = ("dp2", "tp2", "pp2:1f1b mb8")
CASE = Case("compute", "8 layers, width 256: computing dominates", 8, 256, 128, 16)
DDP = "torch DDP"
MEASURED = "as it comes"
OWN = "torch's product"
HEAD = (
    "| plan | DDP, ms | as it comes, ms | torch's product, ms "
    "| as it comes / torch's product | as it comes / DDP | torch's product / DDP |"
)

Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Work:
    """What the ranks do: plans, a model and its batch, and when to end."""

    plans: tuple[str, ...] = PLANS
    case: Case = CASE
    rounds: int = 15
    limit_seconds: float = 150.0


def plait_step(work: Work, plan: str, products: str | ProductTable) -> Callable[[], Any]:
    """A step of one engine; data ranks take their share of the batch."""
    mesh = Mesh.of(Plan.parse(plan))
    world = comm.init(mesh)
    options = Options(blocks="blocks.*", linear_product=products)
    model = work.case.model()
    engine = build(model, plan, loss=cross_entropy, optimizer=adamw, options=options, world=world)
    index, count = world.worker
    inputs, targets = (part.tensor_split(count)[index] for part in work.case.batch())
    return lambda: engine.step((inputs, targets), trace=False)


def measure(work: Work, table: ProductTable) -> Seconds:
    """Seconds of each round by system. Runs in every rank."""
    torch.set_num_threads(1)
    began = time.monotonic()
    everyone = comm.init(Mesh(dp=RANKS))
    steps: dict[str, Callable[[], Any]] = {DDP: ddp(everyone, work.case)}
    for plan in work.plans:
        steps[f"{plan} {MEASURED}"] = plait_step(work, plan, table)
        steps[f"{plan} {OWN}"] = plait_step(work, plan, "torch")
    seconds: Seconds = {name: [] for name in steps}
    gc.disable()
    for index in range(work.rounds + WARM):
        spent = everyone.axis("world").gather_objects(time.monotonic() - began)
        if index >= WARM + FEWEST and max(spent) > work.limit_seconds:
            break
        for name, step in steps.items():
            everyone.barrier()
            start = time.perf_counter()
            step()
            everyone.barrier()
            if index >= WARM:
                seconds[name].append(time.perf_counter() - start)
        gc.collect()
    gc.enable()
    return seconds


def ratio(own: Sequence[float], base: Sequence[float]) -> str:
    """Median and quartiles of the ratio, taken round by round."""
    return quartile_text([a / b for a, b in zip(own, base, strict=True)], ".3f")


def row(plan: str, seconds: Seconds) -> str:
    """A line of the table."""
    base = seconds[DDP]
    measured = seconds[f"{plan} {MEASURED}"]
    own = seconds[f"{plan} {OWN}"]
    times = " | ".join(f"{median(one) * 1e3:.1f}" for one in (base, measured, own))
    ratios = " | ".join((ratio(measured, own), ratio(measured, base), ratio(own, base)))
    return f"| `{plan}` | {times} | {ratios} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", nargs="+", default=list(PLANS), help="plans of two ranks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=150.0, help="no round begins later")
    arguments = parser.parse_args(words)
    announce()
    torch.set_num_threads(1)  # as the ranks, whose table this is
    table = table_here(cache_folder())
    work = Work(tuple(arguments.plans), CASE, arguments.rounds, arguments.seconds)
    seconds = launch(measure, work, table, nproc=RANKS)[0]
    print(f"{HEAD}\n{'|---' * HEAD.count(' | ')}|---|")
    for plan in work.plans:
        print(row(plan, seconds))
    print(
        f"\n{CASE.why}; {len(seconds[DDP])} rounds, {RANKS} ranks of one thread; medians, "
        "quartiles in brackets\n"
        f"as it comes: oneDNN in {len(table.onednn)} of {len(CLASSES)} classes of products, "
        "torch's own in the others"
    )


if __name__ == "__main__":
    main()
