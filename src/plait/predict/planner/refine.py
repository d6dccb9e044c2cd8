"""Climb from the best plans of a search to better ones, one change at a time, until none is left.

The search tries few micro-batches, schedules and data strategies of many ways to split. Here every
one of them is tried beside a winner, and each factor of one axis is moved to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from plait.errors import PlanError
from plait.plan import (
    ContextAxis,
    DataAxis,
    PipelineAxis,
    Plan,
    TensorAxis,
    check_batch,
    check_config,
)
from plait.plan.axes import REMATS
from plait.plan.facts import (
    PIPELINE_SCHEDULES,
    SCHEDULES,
    STRATEGIES,
    DataStrategy,
    strategies_with,
)
from plait.plan.fit import check_messages
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.rough import Guess, RoughPlan
from plait.predict.cost.step import estimate_job
from plait.predict.cost.time.machine import Machine
from plait.predict.planner.search import SearchSettings, cheapest_that_fits, replay_work, score
from plait.predict.planner.space import data_axes, divisors, expert_degrees, suits

STARTS = 3
"""Plans that are climbed from, each of another way to split."""
ROUNDS = 8
TRIED = 10
"""Full estimates of a round: the neighbours that promise most."""
MOST_WORK = 100_000
"""Replaying the schedules of very long pipelines takes seconds: so many micro-batches on stages in
all.
"""
REPLAYED = tuple(
    name
    for name in PIPELINE_SCHEDULES
    if SCHEDULES[name].bubble is not None
    and SCHEDULES[name].stages_per_rank is not None
    and not SCHEDULES[name].asynchronous
    and not SCHEDULES[name].holds_all
)
"""Schedules that flush, fix the stages of a rank and hold less than every micro-batch."""
MOST_VIRTUAL = 16
MOST_EVEN = 32
"""The most stages on a rank that are tried, where they divide the layers evenly."""
AXES = ("tp", "pp", "cp", "dp")


@dataclass
class LocalSearch:
    """One job on one machine; every plan is estimated once."""

    job: Job
    machine: Machine
    settings: SearchSettings
    seen: dict[Plan, Estimate] = field(default_factory=dict)
    work: int = 0
    """Micro-batches on stages that were replayed."""
    cheapest: dict[Plan, Guess | None] = field(default_factory=dict)
    """The cheapest that fits, by the plan from which it was looked for."""
    guesses: dict[Plan, Guess] = field(default_factory=dict)

    def from_plans(self, starts: list[Estimate]) -> list[Estimate]:
        """The plans that were met, best first, those that fit alone."""
        self.seen.update({one.plan: one for one in starts})
        ways: dict[tuple[int, ...], Estimate] = {}
        for one in starts:
            ways.setdefault(
                (one.plan.tp.size, one.plan.pp.size, one.plan.cp.size, one.plan.ep), one
            )
        for start in list(ways.values())[:STARTS]:
            self._climb(start)
        return sorted((one for one in self.seen.values() if one.fits), key=self._score)

    def _score(self, estimate: Estimate) -> float:
        reached = Guess(estimate.plan, estimate.step_seconds, 0.0, estimate.memory.total)
        return score(reached, self.settings.objective)

    def _climb(self, current: Estimate) -> None:
        for _ in range(ROUNDS):
            guesses = [
                guess
                for plan in self._neighbours(current.plan)
                if (guess := self._guess(plan)) is not None
            ]
            guesses.sort(key=lambda guess: score(guess, self.settings.objective))
            plans = [guess.plan for guess in guesses[:TRIED]]
            # Closed forms know nothing of uneven stages: every other schedule of the same plan is
            # replayed.
            pipelines = _pipelines(current.plan.pp.size, self.job.model.num_repeated)
            plans += self._valid(replace(current.plan, pp=pipeline) for pipeline in pipelines)
            best = min(
                (self._estimate(plan) for plan in plans if self._can_afford(plan)),
                key=self._fit_score,
                default=current,
            )
            if self._fit_score(best) >= self._score(current) * (1 - 1e-6):
                return
            current = best

    def _fit_score(self, estimate: Estimate) -> float:
        return self._score(estimate) if estimate.fits else float("inf")

    def _can_afford(self, plan: Plan) -> bool:
        return plan in self.seen or self.work < MOST_WORK

    def _estimate(self, plan: Plan) -> Estimate:
        if plan not in self.seen:
            self.work += replay_work(plan)
            self.seen[plan] = estimate_job(self.job, plan, self.machine)
        return self.seen[plan]

    def _guess(self, plan: Plan) -> Guess | None:
        room = self.machine.memory.usable_bytes(plan)
        if plan in self.guesses:
            known = self.guesses[plan]
            return known if known.memory_bytes <= room else None
        rough = RoughPlan(self.job, plan, self.machine)
        try:
            if rough.memory_bytes > room:
                return None
        except PlanError:
            return None
        self.guesses[plan] = rough.guess
        return rough.guess

    def _neighbours(self, plan: Plan) -> Iterator[Plan]:
        """The plans that differ in one thing, and those of other micro-batches, schedules and
        degrees as they fit best.
        """
        model = self.job.model
        yield from self._valid(replace(plan, remat=remat) for remat in REMATS)
        yield from self._valid(replace(plan, dp=data) for data in self._data(plan))
        share = self.job.global_batch // plan.dp.size
        counts = {
            m
            for one in divisors(max(1, share))
            for m in (one, plan.micro_batches * 2, plan.micro_batches + 1)
        }
        others = [
            replace(plan, micro_batches=count)
            for count in sorted(counts | {max(1, plan.micro_batches - 1)})
        ]
        others += [
            replace(plan, pp=pipeline) for pipeline in _pipelines(plan.pp.size, model.num_repeated)
        ]
        others += [
            replace(plan, cp=ContextAxis(plan.cp.size, word))
            for word in ("ring", "ulysses")
            if plan.cp.size > 1
        ]
        others += [
            replace(plan, ep=ep) for ep in expert_degrees(model, plan.dp.size * plan.cp.size)
        ]
        for other in self._valid([*others, *_moved(plan)]):
            guess = self._cheapest(other)
            if guess is not None:
                self.guesses[guess.plan] = guess
                yield guess.plan

    def _cheapest(self, plan: Plan) -> Guess | None:
        if plan not in self.cheapest:
            found = cheapest_that_fits(self.job, self.machine, plan, self.settings)
            self.cheapest[plan] = found[0]
        return self.cheapest[plan]

    def _data(self, plan: Plan) -> Iterator[DataAxis]:
        size = plan.dp.size
        alone = size * plan.cp.size == 1 and self.settings.fixed.allows(
            replace(plan, dp=DataAxis(1))
        )
        if alone:  # strategies differ in offload, and in nothing else
            offered = self.settings.framework.data
            yield from data_axes(1, 1, offered, 1, offloads=self.settings.offloads)
            return
        tried: tuple[DataStrategy, ...] = ("allreduce", *strategies_with("replicate"))
        for strategy in tried:
            sharded = STRATEGIES[strategy].shards_optimizer
            for replicas in divisors(size)[:-1] if sharded and size > 1 else [1]:
                for offload in (False, True) if sharded and self.settings.offloads else (False,):
                    yield DataAxis(size, strategy, replicate=replicas, offload=offload)

    def _valid(self, plans: Iterator[Plan] | list[Plan]) -> Iterator[Plan]:
        """Plans that the rules of plans, the batch, the model and the framework allow."""
        for plan in plans:
            try:
                plan.check()
                check_batch(plan, self.job.global_batch)
                check_config(plan, self.job.model.sizes)
                check_messages(plan, self.job.messages)
            except PlanError:
                continue
            is_asked = self.settings.allows(plan) and self.settings.fixed.allows(plan)
            if is_asked and suits(self.job.model, plan):
                yield plan


def _pipelines(size: int, layers: int) -> Iterator[PipelineAxis]:
    if size > 1:
        yield from (PipelineAxis(size, name) for name in REPLAYED)
        yield from (
            PipelineAxis(size, name, v)
            for name in PIPELINE_SCHEDULES
            if SCHEDULES[name].needs_virtual
            for v in range(2, layers // size + 1)
            if v <= MOST_VIRTUAL or (v <= MOST_EVEN and layers % (size * v) == 0)
        )


def _moved(plan: Plan) -> Iterator[Plan]:
    """The smallest factor of each axis on another one."""
    sizes = {"tp": plan.tp.size, "pp": plan.pp.size, "cp": plan.cp.size, "dp": plan.dp.size}
    if plan.tp.mode != "1d":
        return
    for source in AXES:
        factor = next((d for d in divisors(sizes[source]) if d > 1), 1)
        for target in AXES:
            if factor > 1 and target != source:
                moved = _resized(
                    plan, {**sizes, source: sizes[source] // factor, target: sizes[target] * factor}
                )
                yield moved
                if (
                    moved.dp.size != plan.dp.size
                ):  # and with micro-batches of as many samples as before
                    yield replace(
                        moved,
                        micro_batches=max(1, plan.micro_batches * plan.dp.size // moved.dp.size),
                    )


def _resized(plan: Plan, sizes: dict[str, int]) -> Plan:
    pp = sizes["pp"]
    cp = sizes["cp"]
    sequence = sizes["tp"] > 1 and (plan.tp.sequence_parallel or plan.tp.size == 1)
    return replace(
        plan,
        tp=TensorAxis(sizes["tp"], "1d", sequence_parallel=sequence),
        pp=replace(plan.pp, size=pp) if pp > 1 and plan.pp.size > 1 else PipelineAxis(pp),
        cp=ContextAxis(cp, plan.cp.strategy) if cp > 1 else ContextAxis(),
        dp=DataAxis(sizes["dp"]),
        ep=plan.ep if sizes["dp"] * cp % plan.ep == 0 else 1,
    )
