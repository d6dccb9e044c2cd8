"""Seconds and bytes of one pipeline rank: the formulas that the estimate and the rough estimate
share.

The estimate asks them for every rank of a plan, the rough estimate for one rank of each kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from plait.plan import Plan
from plait.plan.facts import STRATEGIES
from plait.plan.precisions import PRECISION
from plait.predict.cost.layout import RankState
from plait.predict.cost.memory import host_activations, offload
from plait.predict.cost.memory.rank_memory import Numerics, RankMemory, rank_activations
from plait.predict.cost.records import Job
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.adapters import adapter_pass
from plait.predict.cost.time.collectives import messages_seconds
from plait.predict.cost.time.gradients import DataMessages
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.messages import Message
from plait.predict.cost.time.passes import PassSeconds, block_pass, send_seconds
from plait.predict.cost.time.pipeline import StageSeconds
from plait.predict.cost.time.stages import StageBlocks
from plait.predict.cost.widths import BYTES


@dataclass(frozen=True, eq=False)
class Question:
    """A plan of a job on a machine, and how the plan divides a block."""

    job: Job
    plan: Plan
    machine: Machine
    shard: Sharding

    def passes(self, stages: Sequence[StageBlocks]) -> list[PassSeconds]:
        """One micro-batch on each of these stages."""
        numerics = self.job.numerics(self.plan)
        machine = self.machine
        passes = [job_pass(self.job, stage, machine, self.shard, numerics) for stage in stages]
        if self.offloads:
            moved = (host_activations.of_pass(stage, self.shard, numerics) for stage in stages)
            passes = [
                one.beside(offload.link_seconds(m)) for one, m in zip(passes, moved, strict=True)
            ]
        if self.job.runtime.compute_share < 1.0:
            return [one.computed_by(self.job.runtime.compute_share) for one in passes]
        return passes

    @property
    def updates_in_one_pass(self) -> bool:
        """Whether one kernel reads gradients as backward left them and writes rounded weights."""
        plan = self.plan
        return (
            self.machine.updates_in_one_pass
            and self.job.runtime.one_pass_update
            and self.job.optimizer == "adamw"
            and plan.world_size == 1
            and plan.micro_batches == 1
            and not plan.dp.offload
            and PRECISION[plan.precision].has_masters
        )

    def activations(self, live: tuple[tuple[StageBlocks, int], ...]) -> tuple[float, float]:
        """Bytes that a rank keeps for backward, and what the block at work needs besides.

        `live` pairs its stages with their live micro-batches.
        """
        keeping = host_activations.on_device if self.offloads else rank_activations
        return keeping(
            live, self.shard.of_largest, self.job.numerics(self.plan), self.machine.memory
        )

    @property
    def offloads(self) -> bool:
        """Whether activations leave the device: a processor has no other memory."""
        return self.job.offload_activations and not self.machine.memory.is_host

    def host_bytes(self, live: tuple[tuple[StageBlocks, int], ...]) -> float:
        """Bytes of a rank's activations in the memory of its host; `live` as in `activations`."""
        if not self.offloads:
            return 0.0
        return host_activations.on_host(live, self.shard.of_largest, self.job.numerics(self.plan))

    def send_seconds(self) -> float:
        """Seconds to hand a micro-batch to the next stage."""
        plan = self.plan
        if plan.pp.size == 1:
            return 0.0
        stride = plan.dp.size * plan.cp.size * plan.tp.size
        return send_seconds(self.machine, self.shard, self.job.model.hidden, plan.precision, stride)


@dataclass(frozen=True, eq=False)
class Rank:
    """One pipeline rank: what it holds, and the passes of its stages."""

    question: Question
    state: RankState
    passes: tuple[PassSeconds, ...]

    def stage_costs(self, send: float) -> list[StageSeconds]:
        """The costs of each stage for the pipeline: compute, exposed communication, waiting for the
        host, and the send.
        """
        question = self.question
        runtime = question.job.runtime
        count = len(self.passes)
        blocking = 0.0 if runtime.overlap_sends else send
        action = question.machine.action_seconds(question.plan)
        forward, backward = (part / count + blocking for part in self.sharded_seconds())
        add = self.accumulation_seconds() / count
        costs = []
        for one in self.passes:
            wait_forward, wait_backward = one.waits
            sent_forward, sent_backward = one.exposed(
                runtime.overlap_tensor, runtime.overlap_expert
            )
            whole_forward = one.forward + sent_forward + forward + wait_forward + action
            input_grad = one.input_grad + one.recompute + sent_backward
            input_grad += backward
            input_grad += wait_backward
            input_grad += action
            costs.append(StageSeconds(whole_forward, input_grad, one.weight_grad + add, send))
        return costs

    def sharded_seconds(self) -> tuple[float, float]:
        """Seconds that ZeRO-2 and -3 add to each micro-batch, forward and backward, after
        overlap.
        """
        data = self.state.data
        if not data.forward and not data.backward and not data.first:
            return 0.0, 0.0
        forward = sum(one.forward + one.waits[0] for one in self.passes)
        backward = sum(
            one.input_grad + one.weight_grad + one.recompute + one.waits[1] for one in self.passes
        )
        compute = (forward, backward)
        first, again = self._sharded(replace(data, first=()), compute)
        if not data.first:
            return first, again
        count = self.question.plan.micro_batches
        with_first = self._sharded(replace(data, forward=data.forward + data.first), compute)
        return first + (with_first[0] - first) / count, again

    def _sharded(self, data: DataMessages, compute: tuple[float, float]) -> tuple[float, float]:
        machine = self.question.machine
        return machine.sharded_seconds(data, self.state.buckets, self.question.plan, compute)

    def accumulation_seconds(self) -> float:
        """Seconds of adding a micro-batch's gradients to those before it."""
        job = self.question.job
        plan = self.question.plan
        if job.runtime.fused_accumulation:
            return 0.0
        width = job.gradient_width(plan.precision)
        numbers = self.state.states.gradients / width
        machine = self.question.machine
        seconds = machine.accumulation_seconds(numbers, width, plan.micro_batches)
        if job.runtime.copies_gradients and not self.question.updates_in_one_pass:
            moved: float = BYTES[plan.precision]
            if STRATEGIES[plan.dp.strategy].shards_gradients:
                numbers *= plan.optimizer_shards
                moved += width
            elif plan.micro_batches == 1:
                moved += width  # else counted where they are added up
            seconds += machine.copy_seconds(numbers * moved)
        return seconds

    def tail_seconds(self) -> tuple[float, float]:
        """Seconds after the last backward: the reduction that it could not hide, and the update."""
        job = self.question.job
        plan = self.question.plan
        machine = self.question.machine
        state = self.state
        hidden = 0.0
        if job.runtime.overlap_gradients:
            hidden = sum(one.input_grad + one.weight_grad + one.waits[1] for one in self.passes)
        exposed = machine.reduction_seconds(state.data, state.buckets, plan, hidden)
        if plan.dp.offload:
            moved = state.own * (job.gradient_width(plan.precision) + BYTES[plan.precision])
            update = offload.update_seconds(machine, plan.world_size, state.own, moved)
        elif self.question.updates_in_one_pass:
            # Masters and moments are read and written, gradients read and parameters written.
            numbers = state.gradient_bytes / job.gradient_width(plan.precision)
            moved = 2 * state.states.optimizer + 2 * BYTES[plan.precision] * numbers
            update = machine.copy_seconds(moved)
        else:
            update = machine.update_seconds(state.states.optimizer, state.gradient_bytes)
        return exposed, update + self._matrix_seconds()

    def _matrix_seconds(self) -> float:
        """Seconds of whole matrices: products of the busiest owner, and two exchanges of parts."""
        matrices = self.state.matrices
        if not matrices.flops:
            return 0.0
        machine = self.question.machine
        seconds = matrices.flops / machine.matrix_rate()
        if matrices.ranks == 1:
            return seconds
        # An all-to-all sends all of its payload but a rank's own part.
        payload = matrices.sent_bytes / 2 * matrices.ranks / (matrices.ranks - 1)
        exchange = Message("dp", "all_to_all", payload, "backward", matrices.ranks, 1, 2)
        return seconds + messages_seconds(machine, (exchange,))


def job_pass(
    job: Job, stage: StageBlocks, machine: Machine, shard: Sharding, numerics: Numerics
) -> PassSeconds:
    """One micro-batch of a job on one stage, with the adapters of its layers."""
    whole = stage_pass(stage, machine, shard, numerics)
    if not job.adapters.trained:
        return whole
    frozen = replace(whole, weight_grad=0.0)
    return frozen.plus(adapter_pass(job.adapters, stage, machine, shard, numerics), 1.0)


@lru_cache(maxsize=65536)
def stage_pass(
    stage: StageBlocks, machine: Machine, shard: Sharding, numerics: Numerics
) -> PassSeconds:
    """One micro-batch on one stage; `numerics` is (precision, compiled, recomputation)."""
    total = PassSeconds()
    for block, count, remat in stage.recomputed(numerics[2]):
        total = total.plus(block_pass(block, machine, shard, (*numerics[:2], remat)), count)
    return total


def rank_memory(question: Question, state: RankState, kept: tuple[float, float]) -> RankMemory:
    """The parts of one rank's memory at its peak; `kept` are its activations and buffers, as
    `rank_activations` has them. A process counts as buffers.
    """
    job = question.job
    plan = question.plan
    rules = question.machine.memory
    activations, buffers = kept
    if STRATEGIES[plan.dp.strategy].shards_parameters and plan.dp.size * plan.cp.size > 1:
        # The block at work and the next one, gathered; and the gradients of one, before they are
        # scattered.
        width = 2 * BYTES[plan.precision] + job.gradient_width(plan.precision)
        buffers += state.weights.largest_block * width
        whole = state.weights.kept_dense + state.weights.kept_experts
        buffers += whole * BYTES[plan.precision]
    if job.adapters.coded:  # the block at work and the next one, decoded
        buffers += 2 * state.weights.largest_block * BYTES[plan.precision]
    if plan.pp.size > 1:
        buffers += state.weights.total * job.runtime.whole_gradient_bytes
    states = state.states
    gradients = states.gradients
    if question.updates_in_one_pass:
        gradients *= BYTES[plan.precision] / job.gradient_width(plan.precision)
    return RankMemory(
        states.parameters,
        gradients,
        states.optimizer,
        activations,
        buffers + rules.process_bytes,
    )


def work_floor(question: Question, work: float) -> float:
    """The least seconds of a step of one pipeline's ranks with so much work, where ranks share
    cores. The result is 0 where they do not.
    """
    plan = question.plan
    pipelines = plan.world_size // plan.pp.size
    return question.machine.shared_seconds(pipelines * work, plan.world_size)
