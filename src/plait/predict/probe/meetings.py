"""Synchronisation overhead of a rank, beside the work and the bytes. It is measured in steps of a
real model under small plans.

Ranks that wait lose their caches, and what the engine does round a collective is more than the
collective. So a model of two blocks is trained under a plan of each kind, among few and many ranks.
The cost model predicts its steps from all that was measured before. The remainder is shared out
among the meetings that it counts.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.cluster.cpu_profile import MEETINGS, seconds_by_count
from plait.plan import Plan
from plait.values import JsonMapping, JsonObject

if TYPE_CHECKING:
    from plait.cluster.products import ProductTable
    from plait.comm import World
    from plait.predict.cost.time.machine import (
        Machine,  # what ranks run of this file starts sooner without
    )
    from plait.predict.probe.engine import StepSeconds

PLANS = {
    "call": ("tp2:1d,sp", "tp4:1d,sp", "tp8:1d,sp"),
    "grid": ("tp4:2d",),
    "bucket": ("dp2",),
    "unit": ("dp2:zero3",),
    "visit": ("cp2:ring", "cp4:ring", "cp8:ring"),
    "turn": ("cp2:ulysses",),
    "hand": ("pp2:1f1b",),
}
"""Plans of so many ranks for each kind of meeting. The kinds are collectives of a line, a grid, a
data axis, steps of ring attention, all-to-alls and transfers. ZeRO-3's collectives come between the
blocks and are a kind too. What was found of the earlier is known to the later: ranks of a ring also
sum gradients.
"""
MODEL: JsonObject = {
    "name": "gpt",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "intermediate_size": 512,
}
MODEL |= {"vocab_size": 64, "max_position_embeddings": 128}
SAMPLES = 4
STEPS = 6
"""Large enough that a rank that waits loses its caches."""
ALONE = "dp1"
MOST_STRETCH = 1.5
MOST_IDLE = 1.25


def plans_of(num_ranks: int) -> tuple[str, ...]:
    """The plans of `PLANS` that have so many ranks."""
    return tuple(
        text
        for plans in PLANS.values()
        for text in plans
        if Plan.parse(text).world_size == num_ranks
    )


def shortest_step(text: str, table: ProductTable) -> StepSeconds:
    """The shortest step under a plan, in this rank. Collective, in the world that there is; `ALONE`
    is no matter of others. `table`: the library of each product.
    """
    from plait import comm
    from plait.comm.simulated import simulate
    from plait.mesh import Mesh
    from plait.predict.probe.engine import Tiny, step_seconds

    keys = {key: value for key, value in MODEL.items() if key not in {"name", "num_hidden_layers"}}
    tiny = Tiny("gpt", keys)
    samples = SAMPLES // Plan.parse(text).dp.size

    def measure(world: World) -> StepSeconds:
        return step_seconds(
            tiny,
            MODEL["num_hidden_layers"],
            text,
            world,
            samples=samples,
            steps=STEPS,
            table=table,
        )

    if text == ALONE:
        return simulate(Mesh(), measure)[0]
    world = comm.init(Mesh.of(Plan.parse(text)))
    found = measure(world)
    world.close()
    return found


def stretch(alone: list[float], machine: Machine) -> float:
    """The ratio of a step to the sum of its parts that the `machine` knows, each measured by
    itself. `alone` are the seconds of some ranks, each with a step to itself.
    """
    return min(max(statistics.median(alone) / _work(ALONE, machine), 1.0), MOST_STRETCH)


def idle(steps: dict[str, list[StepSeconds]], num_cores: int) -> float:
    """The ratio of the time of ranks that share cores to their work. At times fewer ranks can go on
    than there are cores.
    """
    crowded = [ranks for ranks in steps.values() if len(ranks) > num_cores]
    if not crowded:
        return 1.0
    ratio = statistics.median(_time_over_work(ranks, num_cores) for ranks in crowded)
    return min(max(ratio, 1.0), MOST_IDLE)


def _time_over_work(ranks: list[StepSeconds], num_cores: int) -> float:
    """The seconds that all cores had for a step, over those that its ranks worked."""
    slowest = max(step.passed for step in ranks)
    return slowest * num_cores / sum(step.work for step in ranks)


def losses(works: dict[str, list[float]], machine: Machine) -> dict[str, dict[str, float]]:
    """Seconds of each kind of meeting, by number of ranks; `works` are the seconds of the ranks of
    each plan.

    The `machine` knows all but this; each kind is what is left when the kinds before it are known.
    """
    from plait.predict.cost.api import job_of
    from plait.predict.cost.time.meeting_counts import meetings_of_step
    from plait.predict.cost.time.processor import Processor

    assert isinstance(machine, Processor)
    seconds: dict[str, dict[str, float]] = {name: {} for name in MEETINGS}
    for name, plans in PLANS.items():
        met = {kind: seconds_by_count(by_ranks) for kind, by_ranks in seconds.items()}
        machine = replace(machine, profile=replace(machine.profile, meetings=met))
        for text in plans:
            if text in works:
                plan = Plan.parse(text)
                times = plan.world_size * meetings_of_step(job_of(_config(), plan), plan, machine)
                seconds[name][str(plan.world_size)] = (
                    max(sum(works[text]) - _work(text, machine), 0.0) / times
                )
    return seconds


def _work(text: str, machine: Machine) -> float:
    from plait.predict.cost.api import job_of
    from plait.predict.cost.step import work_seconds

    plan = Plan.parse(text)
    return work_seconds(job_of(_config(), plan), plan, machine)


def _config() -> JsonMapping:
    from plait.predict.cost.model.tables import config_tables

    data = {"name": "stdlib", "seq_len": MODEL["max_position_embeddings"]}
    return config_tables({"model": MODEL, "data": data, "train": {"global_batch": SAMPLES}})
