"""`remat:auto` beside a search: a faster plan whose blocks recompute by a budget, if there is one.

The search compares words for all blocks. A plan that nearly fits is then recomputed in all of its
blocks. Here the promising ones of those have their blocks chosen one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plait.errors import PlanError
from plait.plan import Plan
from plait.predict.cost.frameworks import PLAIT
from plait.predict.cost.records import Estimate
from plait.predict.cost.rough import RoughPlan
from plait.predict.cost.step import estimate_job
from plait.predict.planner.choose import Choice
from plait.predict.planner.search import MOST_WORK, SearchSettings, replay_work
from plait.predict.planner.space import data_axes

TRIED = 8
"""Plans whose blocks are chosen: those that would be fastest if they recomputed nothing."""
GAIN = 0.005
"""The least part of a step that is worth another choice for each block."""


def faster_by_blocks(choice: Choice, settings: SearchSettings) -> Estimate | None:
    """The fastest plan with `remat:auto` that beats the first of a choice."""
    first = choice.plans[0]
    best: Estimate | None = None
    limit = first.step_seconds * (1 - GAIN)
    work = 0
    for plan in _promising(choice, settings, limit):
        work += replay_work(plan)
        if work > MOST_WORK:
            break
        try:
            found = estimate_job(choice.job, replace(plan, remat="auto"), choice.machine)
        except PlanError:
            continue
        if found.fits and found.step_seconds < limit:
            best = found
            limit = found.step_seconds
    return best


def _promising(choice: Choice, settings: SearchSettings, limit: float) -> Iterator[Plan]:
    """Plans that do not fit without recomputation and would then be faster, fastest first."""
    starts = {guess.plan for guess in choice.found.of_degrees.values()}
    starts |= {one.plan for one in choice.plans[: 2 * TRIED]}
    offered = PLAIT.data
    found: dict[Plan, float] = {}
    for start in starts:
        axes = {start.dp, *data_axes(start.dp.size, start.cp.size, offered, 0, offloads=False)}
        for axis in axes:
            plan = replace(start, dp=axis, remat="none")
            if plan in found or not settings.fixed.allows(replace(plan, remat="auto")):
                continue
            rough = RoughPlan(choice.job, plan, choice.machine)
            try:
                too_large = rough.memory_bytes > choice.machine.memory.usable_bytes(plan)
                if too_large and rough.guess.step_seconds < limit:
                    found[plan] = rough.guess.step_seconds
            except PlanError:
                continue
    order = sorted(found, key=lambda plan: (found[plan], str(plan)))
    yield from order[:TRIED]
