"""Rough estimate of a plan in tens of microseconds: that of `step`, over kinds of ranks instead of
ranks.

Most ranks of a pipeline hold equal blocks. Equal ranks are computed once, by the formulas of
`ranks`; schedules are their closed forms; traffic is left out. It ranks plans; a report is always
the full estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from plait.plan import PipelineAxis, Plan
from plait.plan.facts import SCHEDULES
from plait.predict.cost.layout import RankState, rank_state
from plait.predict.cost.memory.offload import overfull
from plait.predict.cost.model.operations import Model
from plait.predict.cost.ranks import Question, Rank, rank_memory, work_floor
from plait.predict.cost.records import Job
from plait.predict.cost.sharding import sharding
from plait.predict.cost.time.closed import closed_live, closed_seconds
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.stages import StageBlocks, split_model


@dataclass(frozen=True)
class Guess:
    """A plan with its rough time and memory."""

    plan: Plan
    step_seconds: float
    bubble_seconds: float
    memory_bytes: float


@dataclass(frozen=True)
class RankKind:
    """Ranks with equal stages: the stages, how many such ranks, and the most live micro-batches of
    each stage.
    """

    stages: tuple[StageBlocks, ...]
    count: int
    live: tuple[int, ...]


@lru_cache(maxsize=8192)
def kinds(
    model: Model,
    schedule: str,
    sizes: tuple[int, int, int],
    cut: tuple[bool, tuple[int, ...]],
) -> tuple[RankKind, ...]:
    """The kinds of ranks of a pipeline; `sizes` is (ranks, stages of a rank, micro-batches),
    `cut` is (`Runtime.balanced_stages`, `Job.counts`).
    """
    num_ranks, virtual, micro_batches = sizes
    stages = split_model(model, num_ranks * virtual, *cut)
    live, placement = closed_live(schedule, num_ranks, micro_batches, virtual)
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(placement):
        held[rank].append(stage)
    seen: dict[tuple[StageBlocks, ...], tuple[int, tuple[int, ...]]] = {}
    for own in held:
        key = tuple(stages[stage] for stage in own)
        count, most = seen.get(key, (0, (0,) * len(own)))
        seen[key] = (
            count + 1,
            tuple(max(a, live[stage]) for a, stage in zip(most, own, strict=True)),
        )
    return tuple(RankKind(key, count, most) for key, (count, most) in seen.items())


@dataclass(frozen=True, eq=False)
class RoughPlan:
    """A plan whose memory and time are roughly known, each from when it is asked for on.

    Most plans of a search are asked for their memory alone, which is the cheaper of the two.
    """

    job: Job
    asked: Plan
    machine: Machine

    @cached_property
    def question(self) -> Question:
        """The plan as the machine places it."""
        job = self.job
        plan = self.machine.memory.placed(self.asked)
        samples = job.largest_micro_batch(plan)
        shard = sharding(plan, job.model.seq_len, float(samples), job.runtime)
        return Question(job, plan, self.machine, shard)

    @cached_property
    def ranks(self) -> tuple[tuple[RankKind, RankState], ...]:
        """The kinds of ranks, and what each holds. Errors: `PlanError` for too many stages."""
        plan = self.question.plan
        pp = plan.pp
        # Beyond this many the live micro-batches no longer grow, except where all of them live.
        shown = plan.micro_batches
        if not SCHEDULES[pp.schedule].holds_all:
            shown = min(shown, 4 * pp.size)
        inner = _inner(plan.dp, plan.tp, plan.cp, pp.size, plan.ep, plan.precision)
        sizes = (pp.size, pp.virtual, shown)
        cut = (self.job.runtime.balanced_stages, self.job.counts_of(plan))
        found = kinds(self.job.model, pp.schedule, sizes, cut)
        return tuple((kind, rank_state(kind.stages, inner, self.job)) for kind in found)

    @cached_property
    def memory_bytes(self) -> float:
        """The fullest rank's memory; more than there is where the host of a node is too full."""
        memory = host = 0.0
        ranks = self.question.plan.world_size
        for kind, state in self.ranks:
            live = tuple(zip(kind.stages, kind.live, strict=True))
            memory = max(memory, rank_memory(self.question, state, live).total)
            host = max(host, overfull(self.machine, ranks, state.host_bytes))
        if host > 1.0:
            memory = max(memory, host * self.machine.memory_bytes)
        return memory

    @cached_property
    def guess(self) -> Guess:
        """Memory and time."""
        question = self.question
        plan = question.plan
        m = plan.micro_batches
        send = question.send_seconds()
        slowest = total = tail = 0.0
        for kind, state in self.ranks:
            rank = Rank(question, state, tuple(question.passes(kind.stages)))
            busy = sum(stage.total for stage in rank.stage_costs(send))
            slowest = max(slowest, busy)
            total += busy * kind.count
            tail = max(tail, sum(rank.tail_seconds()))
        sizes = (plan.pp.size, plan.pp.virtual, m)
        seconds = closed_seconds(plan.pp.schedule, sizes, slowest, total, send)
        fixed = self.machine.efficiency.step_seconds
        work = m * total + plan.pp.size * (tail + fixed)
        return Guess(
            plan=self.asked,
            step_seconds=max(seconds + tail + fixed, work_floor(question, work)),
            bubble_seconds=seconds - m * slowest,
            memory_bytes=self.memory_bytes,
        )


def rough_estimate(job: Job, plan: Plan, machine: Machine) -> Guess:
    """Rough time and memory of a plan."""
    return RoughPlan(job, plan, machine).guess


@lru_cache(maxsize=65536)
def _inner(*key: Any) -> Plan:
    """A plan reduced to what the state of a rank depends on. Plans that differ in the rest share
    it.
    """
    dp, tp, cp, pp, ep, precision = key
    return Plan(
        dp=dp, tp=tp, cp=cp, pp=PipelineAxis(pp), ep=ep, precision=precision, micro_batches=1
    )
