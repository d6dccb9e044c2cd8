"""Rough estimate of a plan in tens of microseconds: that of `step`, over kinds of ranks instead of
ranks.

Most ranks of a pipeline hold equal blocks. Equal ranks are computed once, by the formulas of
`ranks`; schedules are their closed forms; traffic is left out. It ranks plans; a report is always
the full estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from plait.plan import DataAxis, Plan
from plait.plan.axes import Remat
from plait.plan.facts import SCHEDULES
from plait.predict.cost.layout import RankState, inner_plan, job_sharding, rank_state
from plait.predict.cost.memory.offload import overfull
from plait.predict.cost.model.operations import Model
from plait.predict.cost.ranks import Question, Rank, rank_memory, work_floor
from plait.predict.cost.records import Job
from plait.predict.cost.runtime import StageCut
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.closed import closed_live, closed_seconds
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.passes import PassSeconds
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

    @cached_property
    def live_stages(self) -> tuple[tuple[StageBlocks, int], ...]:
        """The stages, each with its live micro-batches."""
        return tuple(zip(self.stages, self.live, strict=True))


@lru_cache(maxsize=8192)
def kinds(
    model: Model,
    schedule: str,
    sizes: tuple[int, int, int],
    cut: tuple[StageCut, tuple[int, ...]],
) -> tuple[RankKind, ...]:
    """The kinds of ranks of a pipeline; `sizes` is (ranks, stages of a rank, micro-batches),
    `cut` is (`Runtime.stage_cut`, `Job.counts`).
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
class RoughFamily:
    """The plans that differ from `plan` in data strategy and recomputation alone.

    Activations and passes depend on recomputation, states on the data strategy: each is computed
    once, however many plans combine them.
    """

    job: Job
    plan: Plan
    machine: Machine
    _states: dict[DataAxis, tuple[RankState, ...]] = field(default_factory=dict)
    _activations: dict[Remat, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    _passes: dict[Remat, tuple[tuple[PassSeconds, ...], ...]] = field(default_factory=dict)

    def member(self, data: DataAxis, remat: Remat) -> RoughPlan:
        """The plan with this data strategy and recomputation."""
        plan = replace(self.plan, dp=data, remat=remat)
        return RoughPlan(self.job, plan, self.machine, self)

    @cached_property
    def shard(self) -> Sharding:
        """How a plan divides a block."""
        return job_sharding(self.job, self.plan)

    @cached_property
    def kinds(self) -> tuple[RankKind, ...]:
        """The kinds of ranks. Errors: `PlanError` for too many stages."""
        plan = self.plan
        pp = plan.pp
        # Beyond this many the live micro-batches no longer grow, except where all of them live.
        shown = plan.micro_batches
        if not SCHEDULES[pp.schedule].holds_all:
            shown = min(shown, 4 * pp.size)
        sizes = (pp.size, pp.virtual, shown)
        cut = (self.job.runtime.stage_cut, self.job.counts_of(plan))
        return kinds(self.job.model, pp.schedule, sizes, cut)

    @cached_property
    def send_seconds(self) -> float:
        """Seconds to hand a micro-batch to the next stage."""
        return Question(self.job, self.plan, self.machine, self.shard).send_seconds()

    def states(self, data: DataAxis) -> tuple[RankState, ...]:
        """The state of each kind of rank."""
        if data not in self._states:
            inner = inner_plan(replace(self.plan, dp=data))
            training = self.job.training
            self._states[data] = tuple(
                rank_state(kind.stages, inner, training) for kind in self.kinds
            )
        return self._states[data]

    def activations(self, question: Question) -> tuple[tuple[float, float], ...]:
        """Bytes that each kind of rank keeps, and those at work beside them."""
        remat = question.plan.remat
        if remat not in self._activations:
            self._activations[remat] = tuple(
                question.activations(kind.live_stages) for kind in self.kinds
            )
        return self._activations[remat]

    def passes(self, question: Question) -> tuple[tuple[PassSeconds, ...], ...]:
        """One micro-batch on the stages of each kind of rank."""
        remat = question.plan.remat
        if remat not in self._passes:
            self._passes[remat] = tuple(tuple(question.passes(kind.stages)) for kind in self.kinds)
        return self._passes[remat]


@dataclass(frozen=True, eq=False)
class RoughPlan:
    """A plan whose memory and time are roughly known, each from when it is asked for on.

    Most plans of a search are asked for their memory alone, which is the cheaper of the two.
    """

    job: Job
    asked: Plan
    machine: Machine
    among: RoughFamily | None = None
    """Plans that it shares results with; None: none."""

    @cached_property
    def family(self) -> RoughFamily:
        """The plans that it shares results with, or a family of its own."""
        return self.among or RoughFamily(self.job, self.asked, self.machine)

    @cached_property
    def question(self) -> Question:
        """The plan as the machine places it."""
        plan = self.machine.memory.placed(self.asked)
        return Question(self.job, plan, self.machine, self.family.shard)

    @cached_property
    def states(self) -> tuple[RankState, ...]:
        """The state of each kind of rank. Errors: `PlanError` for too many stages."""
        return self.family.states(self.question.plan.dp)

    @property
    def kept_bytes(self) -> float:
        """The part of `memory_bytes` that no data strategy changes: what the fullest rank keeps."""
        return max(sum(kept) for kept in self.family.activations(self.question))

    @cached_property
    def memory_bytes(self) -> float:
        """The fullest rank's memory; more than there is where the host of a node is too full."""
        memory = host = 0.0
        ranks = self.question.plan.world_size
        activations = self.family.activations(self.question)
        for state, kept in zip(self.states, activations, strict=True):
            memory = max(memory, rank_memory(self.question, state, kept).total)
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
        send = self.family.send_seconds
        slowest = total = tail = 0.0
        family = self.family
        passes = family.passes(question)
        for kind, state, own in zip(family.kinds, self.states, passes, strict=True):
            rank = Rank(question, state, own)
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
