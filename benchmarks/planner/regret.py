"""The regret of the search: the plan that it chooses against the best of every plan there is.

    python -m benchmarks.planner.regret [--devices 8 16] [--frameworks plait torchtitan ...]

The enumeration takes all degrees, every number of micro-batches that divides a rank's samples, all
schedules with every number of virtual stages, all data strategies and all recomputation that is one
word for all blocks. A choice with `remat:auto` is left out. A plan is priced by the full estimate
unless closed forms say that it does not fit, or is a fifth slower than the best one found.
`--bounded` also leaves out degrees whose bound is above that one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.machine import announce
from plait.cluster import Cluster
from plait.errors import PlanError
from plait.plan import DataAxis, PipelineAxis, Plan, check_batch, check_config
from plait.plan.axes import REMATS
from plait.plan.facts import PIPELINE_SCHEDULES, SCHEDULES, ZERO
from plait.predict.cost.frameworks import FRAMEWORKS
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.rough import RoughPlan
from plait.predict.cost.step import estimate_job
from plait.predict.cost.time.machine import Machine
from plait.predict.planner.choose import NothingFits, decide
from plait.predict.planner.search import SearchSettings, time_floor
from plait.predict.planner.space import Degrees, degrees, divisors

CONFIGS = {
    "1.3B": {
        "model": {
            "name": "gpt",
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "vocab_size": 50304,
        },
        "data": {"seq_len": 2048},
        "train": {"global_batch": 64},
    },
    "13B": {
        "model": {
            "name": "gpt",
            "num_hidden_layers": 40,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "vocab_size": 50304,
        },
        "data": {"seq_len": 2048},
        "train": {"global_batch": 16},
    },
}
"""A model that fits everywhere, and one whose states and few samples ask for other axes."""
MARGIN = 1.2
"""Plans whose rough time is so many times the best full one are not priced in full."""


def pipelines(size: int, layers: int) -> Iterator[PipelineAxis]:
    """Every schedule of a number of stages that flushes or holds all."""
    if size == 1:
        yield PipelineAxis(1)
        return
    for name in PIPELINE_SCHEDULES:
        facts = SCHEDULES[name]
        if facts.asynchronous:
            continue
        for virtual in range(2, layers // size + 1) if facts.needs_virtual else (0,):
            yield PipelineAxis(size, name, virtual)


def data_axes(one: Degrees) -> Iterator[DataAxis]:
    """Every strategy that steps together, with every number of replicas."""
    yield DataAxis(one.dp)
    if one.dp * one.cp.size == 1:
        return
    for stage in (1, 2, 3):
        for replicas in divisors(one.dp)[:-1] or [1]:
            yield DataAxis(one.dp, ZERO[stage], replicate=replicas)


def plans(one: Degrees, job: Job, settings: SearchSettings) -> Iterator[Plan]:
    """Every plan of some degrees that whoever runs it has."""
    for count in divisors(max(1, job.global_batch // one.dp)):
        for pipeline in pipelines(one.pp, job.model.num_repeated):
            for data in data_axes(one):
                for remat in REMATS:
                    plan = Plan(data, one.tp, pipeline, one.ep, one.cp, count, remat, "bf16")
                    if settings.allows(plan) and is_plan(plan, job):
                        yield plan


def is_plan(plan: Plan, job: Job) -> bool:
    """Whether the rules of plans, the batch and the model allow it."""
    try:
        plan.check()
        check_batch(plan, job.global_batch)
        check_config(plan, job.model.sizes)
    except PlanError:
        return False
    return plan.pp.num_stages <= job.model.num_blocks


def exhaustive(
    job: Job, machine: Machine, num_devices: int, settings: SearchSettings, *, bounded: bool
) -> tuple[Estimate | None, int]:
    """The best plan that fits, and how many plans were looked at."""
    node = machine.devices_per_node
    sequence = settings.framework.sequence_parallel
    ways = list(degrees(job.model, num_devices, job.global_batch, node, sequence=sequence))
    floors = sorted((time_floor(job, machine, one, settings), str(one), one) for one in ways)
    best: Estimate | None = None
    looked = 0
    for floor, _, one in floors:
        if bounded and best is not None and floor > best.step_seconds:
            break
        for plan in plans(one, job, settings):
            looked += 1
            rough = RoughPlan(job, plan, machine)
            try:
                if rough.memory_bytes > machine.memory.usable_bytes(plan):
                    continue
                if best is not None and rough.guess.step_seconds > MARGIN * best.step_seconds:
                    continue
                found = estimate_job(job, plan, machine)
            except PlanError:
                continue
            if found.fits and (best is None or found.step_seconds < best.step_seconds):
                best = found
    return best, looked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--frameworks", nargs="+", default=list(FRAMEWORKS))
    parser.add_argument("--device", default="a100-40gb")
    parser.add_argument("--models", nargs="+", default=list(CONFIGS))
    parser.add_argument("--bounded", action="store_true")
    arguments = parser.parse_args()
    announce()
    print("| framework | model | devices | chosen | best of all | plans | regret | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.frameworks:
        for model in arguments.models:
            for size in arguments.devices:
                cells = row(name, model, f"{arguments.device}x{size}", bounded=arguments.bounded)
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


def row(name: str, model: str, cluster: str, *, bounded: bool) -> tuple[object, ...]:
    """The cells of one line; the last are the processor seconds of the enumeration."""
    size = Cluster.parse(cluster).num_devices
    try:
        choice = decide(CONFIGS[model], cluster, framework=name)
    except NothingFits:
        return (name, model, size, "nothing fits", "", "", "", "")
    settings = SearchSettings(framework=FRAMEWORKS[name])
    began = time.process_time()
    best, looked = exhaustive(choice.job, choice.machine, size, settings, bounded=bounded)
    spent = f"{time.process_time() - began:.0f}"
    ours = next(one for one in choice.plans if one.plan.remat != "auto")
    if best is None:
        return (name, model, size, f"`{text(ours)}`", "none", f"{looked:,}", "", spent)
    regret = f"{ours.step_seconds / best.step_seconds - 1:.1%}"
    both = (f"`{text(ours)}`", f"`{text(best)}`")
    return (name, model, size, *both, f"{looked:,}", regret, spent)


def text(one: Estimate) -> str:
    """The plan without its precision, which all have."""
    return str(replace(one.plan, precision="float32"))


if __name__ == "__main__":
    main()
