"""`remat:auto` in a search: a faster plan whose blocks recompute by a budget, if there is one.

The search compares words for all blocks. A plan that nearly fits is then recomputed in all of its
blocks. Here the promising ones of those have their blocks chosen one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from plait.errors import PlanError
from plait.plan import Plan
from plait.predict.cost.frameworks import PLAIT
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.rough import Guess, RoughPlan
from plait.predict.cost.step import estimate_job
from plait.predict.cost.time.machine import Machine
from plait.predict.planner.search import SearchSettings, replay_work
from plait.predict.planner.space import data_axes

TRIED = 8
"""Plans whose blocks are chosen: those that would be fastest if they recomputed nothing."""
MOST_WORK = 50_000
"""Replaying the schedules of very long pipelines takes seconds: so many micro-batches on stages in
all.
"""
GAIN = 0.005
"""The least part of a step that is worth another choice for each block."""


@dataclass(frozen=True)
class BlockSearch:
    """A search by blocks: what was found before it, and the machine whose memory they may fill."""

    job: Job
    machine: Machine
    settings: SearchSettings
    plans: Sequence[Estimate]
    """Best first."""
    guesses: Sequence[Guess]
    """The best of each combination of degrees."""

    def faster(self) -> Estimate | None:
        """The fastest plan with `remat:auto` that beats the first of the others."""
        best: Estimate | None = None
        limit = self.plans[0].step_seconds * (1 - GAIN)
        work = 0
        for plan in self._promising(limit):
            work += replay_work(plan)
            if work > MOST_WORK:
                break
            try:
                found = estimate_job(self.job, replace(plan, remat="auto"), self.machine)
            except PlanError:
                continue
            if found.fits and found.step_seconds < limit:
                best = found
                limit = found.step_seconds
        return best

    def _promising(self, limit: float) -> list[Plan]:
        """Plans that do not fit without recomputation and would then be faster, fastest first."""
        found: dict[Plan, float] = {}
        for plan in self._without_recomputation():
            rough = RoughPlan(self.job, plan, self.machine)
            try:
                too_large = rough.memory_bytes > self.machine.memory.usable_bytes(plan)
                if too_large and rough.guess.step_seconds < limit:
                    found[plan] = rough.guess.step_seconds
            except PlanError:
                continue
        return sorted(found, key=lambda plan: (found[plan], str(plan)))[:TRIED]

    def _without_recomputation(self) -> Iterator[Plan]:
        starts = {guess.plan for guess in self.guesses}
        starts |= {one.plan for one in self.plans[: 2 * TRIED]}
        seen: set[Plan] = set()
        for start in starts:
            axes = data_axes(start.dp.size, start.cp.size, PLAIT.data, 0, offloads=False)
            for axis in (start.dp, *axes):
                plan = replace(start, dp=axis, remat="none")
                asked = replace(plan, remat="auto")
                allows = self.settings.allows(asked) and self.settings.fixed.allows(asked)
                if plan not in seen and allows:
                    seen.add(plan)
                    yield plan
