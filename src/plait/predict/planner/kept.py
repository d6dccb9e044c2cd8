"""`keep_gathered` in a search: a faster plan whose blocks zero3 keeps whole, if there is one.

The search compares plans whose blocks are gathered for every use. Here the promising ones of those
with zero3 keep as many blocks as the memory has room for. What is saved is communication of the
data axis at most, so few plans promise anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.errors import PlanError
from plait.plan import Plan, gathers_layers
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.rough import Guess
from plait.predict.cost.step import estimate_job
from plait.predict.cost.time.machine import Machine
from plait.predict.planner.blocks import GAIN, MOST_WORK, TRIED
from plait.predict.planner.search import replay_work

SLOWEST = 1.5
"""A guess this much above the best plan is not tried: its gathers are not looked at before."""


@dataclass(frozen=True)
class KeptSearch:
    """A search for kept blocks: what was found before it, and the machine whose memory they may
    fill.
    """

    job: Job
    machine: Machine
    plans: Sequence[Estimate]
    """Best first."""
    guesses: Sequence[Guess]
    """The best of each combination of degrees."""

    def faster(self) -> Estimate | None:
        """The fastest plan with kept blocks that beats the first of the others."""
        best: Estimate | None = None
        limit = self.plans[0].step_seconds * (1 - GAIN)
        keeping = replace(self.job, kept="auto")
        work = 0
        for plan in self._promising(limit):
            work += 3 * replay_work(plan)  # without kept blocks, with them, and as it is answered
            if work > MOST_WORK:
                break
            try:
                found = estimate_job(keeping, plan, self.machine)
            except PlanError:
                continue
            if found.keep_gathered and found.fits and found.step_seconds < limit:
                best = found
                limit = found.step_seconds
        return best

    def _promising(self, limit: float) -> list[Plan]:
        """Plans that gather layers and could be faster without that, fastest first."""
        least = {
            guess.plan: guess.step_seconds / SLOWEST
            for guess in self.guesses
            if gathers_layers(guess.plan)
        }
        for one in self.plans:
            if gathers_layers(one.plan):
                least[one.plan] = one.step_seconds - one.breakdown.data
        found = [plan for plan, seconds in least.items() if seconds < limit]
        return sorted(found, key=lambda plan: (least[plan], str(plan)))[:TRIED]
