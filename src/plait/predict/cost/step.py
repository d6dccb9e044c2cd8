"""Predict one plan: passes of the stages, the pipeline over them, the data axis and the update.

Everything that two ranks or two plans have in common is computed once. The pieces are cached by
their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from plait.plan import Plan
from plait.predict.cost.bars import reach
from plait.predict.cost.keeping import keeping, kept_of
from plait.predict.cost.layout import PlanLayout
from plait.predict.cost.memory.offload import overfull
from plait.predict.cost.model.operations import Model
from plait.predict.cost.ranks import Question, Rank, rank_memory, work_floor
from plait.predict.cost.records import Breakdown, Estimate, Job
from plait.predict.cost.remat.blocks import lay_out_recomputed, words_of
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.pipeline import (
    PipelineTime,
    StageSeconds,
    crowded_seconds,
    pipeline_time,
)
from plait.predict.cost.traffic import traffic


def estimate_job(job: Job, plan: Plan, machine: Machine) -> Estimate:
    """Predict one plan by replaying its schedule.

    The plan's world may be smaller than the machine; prices count the plan's devices.
    """
    plan_asked = plan
    plan = machine.memory.placed(plan)
    layout, kept_whole = laid_out(job, plan, machine)
    question = Question(job, plan, machine, layout.shard)
    memories = tuple(
        rank_memory(question, layout.ranks[rank], question.activations(layout.live_stages(rank)))
        for rank in range(plan.pp.size)
    )
    step = predict_step(question, layout)
    states = list(zip(layout.held, layout.ranks, strict=True))
    host_bytes = max(
        state.host_bytes + question.host_bytes(layout.live_stages(rank))
        for rank, state in enumerate(layout.ranks)
    )
    return Estimate(
        plan=plan_asked,
        step_seconds=step.seconds,
        memory=max(memories, key=lambda memory: memory.total),
        memory_limit=machine.memory.usable_bytes(plan),
        traffic=traffic(job, plan, layout.shard, layout.stages, states),
        bubble_fraction=step.pipeline.bubble_fraction,
        tokens=job.global_batch * job.model.seq_len,
        model_flops=3.0 * square_flops(job.model) * job.global_batch,
        num_devices=plan.world_size,
        peak_flops=machine.peak_flops[plan.precision],
        price_per_hour=machine.price_per_hour,
        breakdown=step.breakdown(),
        stage_memory=memories,
        host_overfull=overfull(machine, plan.world_size, host_bytes),
        state_bytes=4.0 * job.model.parameters * (1 + job.state_numbers),
        power_watts=machine.power_watts,
        causal_flops=3.0 * job.model.forward_flops * job.global_batch,
        unit="tokens" if job.model.seq_len > 1 else "samples",
        bar_width=machine.bar_width,
        devices_per_node=machine.devices_per_node,
        network_bandwidth=machine.network_bandwidth,
        reach=reach(plan.world_size, machine.devices_per_node),
        remat=words_of(layout.stages),
        keep_gathered=kept_whole if job.kept is not None else None,
    )


def laid_out(job: Job, plan: Plan, machine: Machine) -> tuple[PlanLayout, tuple[int, ...]]:
    """The layout of a plan, and the blocks of it that ZeRO-3 keeps whole.

    Those that the planner chooses are none where keeping them would make no step shorter.
    """
    layout = lay_out_recomputed(job, plan, machine)
    if not job.kept:
        return layout, ()
    question = Question(job, plan, machine, layout.shard)
    kept = kept_of(question, layout)
    whole = keeping(question, layout, kept)
    if job.kept == "auto" and kept:
        before, after = (predict_step(question, one).seconds for one in (layout, whole))
        if after >= before:
            return layout, ()
    return whole, kept


@lru_cache(maxsize=64)
def square_flops(model: Model) -> float:
    """Forward flops of one sample with the whole square of attention (Chowdhery et al., PaLM,
    appendix B).
    """
    return sum(block.flops(model.seq_len) * count for block, count in model.runs) * model.seq_len


@dataclass(frozen=True, eq=False)
class PredictedStep:
    """A step of a plan: its ranks, their costs, and the replay of its schedule."""

    question: Question
    ranks: tuple[Rank, ...]
    costs: tuple[StageSeconds, ...]
    """Costs of each stage of the pipeline."""
    tails: tuple[tuple[float, float], ...]
    """Exposed reduction and update of each rank."""
    pipeline: PipelineTime

    @property
    def _fixed(self) -> float:
        return self.question.machine.efficiency.step_seconds

    @property
    def work(self) -> float:
        """Seconds that the ranks of one pipeline compute and communicate, added up."""
        return sum(
            busy + sum(tail) + self._fixed
            for busy, tail in zip(self.pipeline.busy, self.tails, strict=True)
        )

    @cached_property
    def _last(self) -> tuple[float, int]:
        """When the last rank ends, and which it is."""
        return max(
            (self.pipeline.rank_ends[rank] + sum(tail), rank)
            for rank, tail in enumerate(self.tails)
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds of the step. With more ranks than cores, one works while another waits, and all
        work must be done.
        """
        return max(self._last[0] + self._fixed, self._crowded)

    @cached_property
    def _crowded(self) -> float:
        """Seconds that the cores need for the work of all ranks, where ranks share them. Each
        pipeline has its share of the cores.
        """
        plan = self.question.plan
        machine = self.question.machine
        if not machine.shares_cores(plan.world_size):
            return 0.0
        whole = work_floor(self.question, self.work)
        size = plan.pp.size
        if size == 1:
            return whole
        pipelines = plan.world_size // size
        cores = max(1, machine.cores // pipelines)
        stretch = max(1.0, pipelines / machine.cores)
        slower = [one.stretched(stretch) for one in self.costs]
        after = pipelines * sum(sum(tail) + self._fixed for tail in self.tails) / machine.cores
        replayed = crowded_seconds(plan.pp.schedule, size, plan.micro_batches, slower, cores)
        return max(whole, replayed + after)

    def breakdown(self) -> Breakdown:
        """Seconds by cause: compute of the busiest rank, and the tail of the last one.

        Both can be more than the step where stages are of two kinds: then all is the last rank's.
        """
        worst = max(range(len(self.ranks)), key=lambda rank: self.pipeline.busy[rank])
        parts = self._parts(worst)
        if sum(parts.values()) > self.seconds * (1 + 1e-9):
            parts = self._parts(self._last[1])
        return Breakdown(bubble=max(0.0, self.seconds - sum(parts.values())), **parts)

    def _parts(self, busiest: int) -> dict[str, float]:
        """Seconds by cause without the bubble: passes of a rank, and the tail of the last one."""
        runtime = self.question.job.runtime
        m = self.question.plan.micro_batches
        end, last = self._last
        rank = self.ranks[busiest]
        passes = rank.passes
        exposed, update = self.tails[last]
        added = rank.accumulation_seconds()
        return {
            "compute": m * (sum(one.compute - one.recompute for one in passes) + added),
            "recompute": m * sum(one.recompute for one in passes),
            "tensor": m * sum(one.tensor for one in passes) * (1.0 - runtime.overlap_tensor),
            "context": m * sum(one.context for one in passes),
            "expert": m * sum(one.expert for one in passes) * (1.0 - runtime.overlap_expert),
            "data": exposed + m * sum(rank.sharded_seconds()),
            "update": update,
            "host": m * sum(sum(one.waits) for one in passes),
            "cores": max(0.0, self.seconds - (end + self._fixed)),
            "other": self._fixed,
        }


def predict_step(question: Question, layout: PlanLayout) -> PredictedStep:
    """The step of a plan that is laid out, its schedule replayed."""
    plan = question.plan
    passes = question.passes(layout.stages)
    send = question.send_seconds()
    ranks: list[Rank] = []
    costs = [StageSeconds(0.0, 0.0, 0.0)] * len(passes)
    for state, held in zip(layout.ranks, layout.held, strict=True):
        rank = Rank(question, state, tuple(passes[stage] for stage in held))
        ranks.append(rank)
        for stage, cost in zip(held, rank.stage_costs(send), strict=True):
            costs[stage] = cost
    pipeline = pipeline_time(plan.pp.schedule, plan.pp.size, plan.micro_batches, costs)
    tails = tuple(rank.tail_seconds() for rank in ranks)
    return PredictedStep(question, tuple(ranks), tuple(costs), tails, pipeline)


def step_of(job: Job, plan: Plan, machine: Machine) -> PredictedStep:
    """The predicted step of a plan, with the costs that its pipeline was given."""
    layout, _ = laid_out(job, plan, machine)
    return predict_step(Question(job, plan, machine, layout.shard), layout)


def pass_costs(job: Job, plan: Plan, machine: Machine) -> tuple[list[StageSeconds], list[float]]:
    """The costs of every stage that a prediction gives its pipeline, and the seconds of each rank's
    update and reduction.
    """
    step = step_of(job, plan, machine)
    return list(step.costs), [sum(tail) for tail in step.tails]


def work_seconds(job: Job, plan: Plan, machine: Machine) -> float:
    """Seconds that all ranks compute and communicate in a step, added up: waiting is no work."""
    return plan.world_size // plan.pp.size * step_of(job, plan, machine).work
