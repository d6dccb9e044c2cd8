"""Predict one plan: stages, their passes, the pipeline over them, the data axis and the update, and what each rank holds.

Everything that two ranks or two plans have in common is computed once: the pieces are cached by what they depend on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from plait.cost.closed import closed_live, closed_time
from plait.cost.gradients import DataMessages, data_messages, messages_seconds
from plait.cost.kernels import BYTES
from plait.cost.machine import Machine
from plait.cost.memory import PROCESS_BYTES_CPU, Memory, Weights, model_states, rank_activations, stage_weights, usable_bytes
from plait.cost.operations import Model
from plait.cost.pipeline import PipelineTime, StageSeconds, live_micro_batches, pipeline_time
from plait.cost.records import Breakdown, Estimate, Job
from plait.cost.sharding import Sharding, sharding
from plait.cost.stages import Stage, split_model
from plait.cost.time import PassSeconds, block_pass, send_seconds, update_seconds
from plait.cost.traffic import traffic


@dataclass(frozen=True)
class RankState:
    """What one pipeline rank holds and sends on the data axis."""

    weights: Weights
    data: DataMessages
    states: Memory


@dataclass(frozen=True)
class Layout:
    """A plan laid over a model: its stages, who holds them, and what each rank holds."""

    shard: Sharding
    stages: tuple[Stage, ...]
    held: tuple[tuple[int, ...], ...]
    """Stages of each rank."""
    live: tuple[int, ...]
    """Live micro-batches of each stage at the peak of its rank."""
    ranks: tuple[RankState, ...]


def estimate_job(job: Job, plan: Any, machine: Machine, closed: bool = False) -> Estimate:
    """Predict one plan. `closed` uses the closed forms of schedules instead of replaying their actions.

    The plan's world may be smaller than the machine; prices count the plan's devices.
    """
    layout = lay_out(job, plan, closed)
    process = PROCESS_BYTES_CPU if machine.is_cpu else 0.0
    memories = tuple(rank_memory(job, plan, layout, rank, process) for rank in range(plan.pp.size))
    pipeline, breakdown, seconds = step_seconds(job, plan, machine, layout, closed)
    return Estimate(
        plan=plan,
        step_seconds=seconds,
        memory=max(memories, key=lambda memory: memory.total),
        memory_limit=usable_bytes(machine.memory_bytes, plan, machine.is_cpu),
        traffic=traffic(job.model, plan, layout.shard, layout.stages, _data_messages(layout)),
        bubble_fraction=pipeline.bubble_fraction,
        tokens=job.global_batch * job.model.seq_len,
        model_flops=3.0 * square_flops(job.model) * job.global_batch,
        num_devices=plan.world_size,
        peak_flops=machine.peak_flops[plan.precision],
        price_per_hour=machine.price_per_hour,
        breakdown=breakdown,
        stage_memory=memories,
    )


def _data_messages(layout: Layout) -> list[tuple[tuple[int, ...], DataMessages]]:
    return [(own, rank.data) for own, rank in zip(layout.held, layout.ranks, strict=True)]


@lru_cache(maxsize=64)
def square_flops(model: Model) -> float:
    """Forward flops of one sample with the whole square of attention (Chowdhery et al., PaLM, appendix B)."""
    return sum(block.flops(model.seq_len) * count for block, count in model.runs) * model.seq_len


def lay_out(job: Job, plan: Any, closed: bool) -> Layout:
    """The stages of a plan and what each rank holds."""
    samples = -(-job.global_batch // (plan.dp.size * plan.micro_batches))  # of the largest micro-batch
    shard = sharding(plan, job.model.seq_len, float(samples), regather=not job.runtime.keep_gathered)
    stages = split_model(job.model, plan.pp.num_stages, job.runtime.balanced_stages)
    find = closed_live if closed and plan.pp.size > 1 else live_micro_batches
    live, placement = find(plan.pp.schedule, plan.pp.size, plan.micro_batches, plan.pp.virtual)
    held = _held(placement, plan.pp.size)
    ranks = tuple(rank_state(tuple(stages[stage] for stage in own), plan, job) for own in held)
    return Layout(shard, stages, held, live, ranks)


@lru_cache(maxsize=1024)
def _held(placement: tuple[int, ...], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(stage for stage, holder in enumerate(placement) if holder == rank) for rank in range(num_ranks))


@lru_cache(maxsize=65536)
def rank_state(stages: tuple[Stage, ...], plan: Any, job: Job) -> RankState:
    """What a rank with these stages holds."""
    weights = stage_weights(stages, sharding(plan, 1, 1.0), job.model.tied_parameters)
    width = job.gradient_width(plan.precision)
    return RankState(weights, data_messages(plan, weights, width), model_states(weights, plan, job.optimizer, width))


def rank_memory(job: Job, plan: Any, layout: Layout, rank: int, process_bytes: float = 0.0) -> Memory:
    """The parts of one rank's memory at its peak; `process_bytes` are counted as buffers."""
    state, own = layout.ranks[rank], layout.held[rank]
    held = tuple((layout.stages[stage], layout.live[stage]) for stage in own)
    activations, buffers = rank_activations(held, layout.shard, (plan.precision, plan.compile, plan.remat))
    if plan.dp.strategy == "zero3" and plan.dp.size * plan.cp.size > 1:
        # The block at work and the next one, gathered; and the gradients of one, before they are scattered.
        buffers += state.weights.largest_block * (2 * BYTES[plan.precision] + job.gradient_width(plan.precision))
    return Memory(state.states.parameters, state.states.gradients, state.states.optimizer, activations, buffers + process_bytes)


@lru_cache(maxsize=65536)
def stage_pass(stage: Stage, machine: Machine, shard: Sharding, numerics: tuple[str, bool, str]) -> PassSeconds:
    """One micro-batch on one stage; `numerics` is (precision, compiled, recomputation)."""
    total = PassSeconds()
    for block, count in stage.runs:
        total = total.plus(block_pass(block, machine, shard, numerics), count)
    return total


def step_seconds(job: Job, plan: Any, machine: Machine, layout: Layout, closed: bool) -> tuple[PipelineTime, Breakdown, float]:
    """Seconds of a step, with the pipeline's part and the causes."""
    numerics = (plan.precision, plan.compile, plan.remat)
    passes = [stage_pass(stage, machine, layout.shard, numerics) for stage in layout.stages]
    sharded = [_sharded_seconds(machine, layout, passes, rank) for rank in range(plan.pp.size)]
    costs = _stage_costs(job, plan, machine, layout, passes=passes, sharded=sharded)
    run = closed_time if closed and plan.pp.size > 1 else pipeline_time
    pipeline = run(plan.pp.schedule, plan.pp.size, plan.micro_batches, costs)
    tails = [_tail(job, machine, layout, passes, rank) for rank in range(plan.pp.size)]
    end, last = max((pipeline.rank_ends[rank] + sum(tail), rank) for rank, tail in enumerate(tails))
    seconds = end + machine.efficiency.step_seconds
    worst = max(range(plan.pp.size), key=lambda rank: pipeline.busy[rank])
    own, m = [passes[stage] for stage in layout.held[worst]], plan.micro_batches
    exposed, update = tails[last]
    parts = {
        "compute": m * sum(p.compute - p.recompute for p in own),
        "recompute": m * sum(p.recompute for p in own),
        "tensor": m * sum(p.tensor for p in own) * (1.0 - job.runtime.overlap_tensor),
        "context": m * sum(p.context for p in own),
        "expert": m * sum(p.expert for p in own),
        "data": exposed + m * sum(sharded[worst]),
        "update": update,
        "host": m * sum(sum(p.waits) for p in own),
        "other": machine.efficiency.step_seconds,
    }
    return pipeline, Breakdown(bubble=max(0.0, seconds - sum(parts.values())), **parts), seconds


def pass_costs(job: Job, plan: Any, machine: Machine) -> tuple[list[StageSeconds], list[float]]:
    """What a prediction gives its pipeline: the costs of every stage, and the seconds of each rank's update and reduction."""
    layout = lay_out(job, plan, False)
    passes = [stage_pass(stage, machine, layout.shard, (plan.precision, plan.compile, plan.remat)) for stage in layout.stages]
    sharded = [_sharded_seconds(machine, layout, passes, rank) for rank in range(plan.pp.size)]
    tails = [sum(_tail(job, machine, layout, passes, rank)) for rank in range(plan.pp.size)]
    return _stage_costs(job, plan, machine, layout, passes=passes, sharded=sharded), tails


def _stage_costs(
    job: Job, plan: Any, machine: Machine, layout: Layout, *, passes: list[PassSeconds], sharded: list[tuple[float, float]]
) -> list[StageSeconds]:
    """What the pipeline sees of each stage: compute, exposed communication, waiting for the host, and the send."""
    stride = plan.dp.size * plan.cp.size * plan.tp.size
    send = send_seconds(machine, layout.shard, job.model.hidden, plan.precision, stride) if plan.pp.size > 1 else 0.0
    blocking = 0.0 if job.runtime.overlap_sends else send
    shown = 1.0 - job.runtime.overlap_tensor
    costs: list[StageSeconds] = [StageSeconds(0.0, 0.0, 0.0)] * len(passes)
    for rank, own in enumerate(layout.held):
        forward, backward = (part / len(own) + blocking for part in sharded[rank])
        for stage in own:
            one = passes[stage]
            wait_forward, wait_backward = one.waits
            costs[stage] = StageSeconds(
                forward=one.forward + shown * one.communication_forward + forward + wait_forward,
                input_grad=one.input_grad + one.recompute + shown * one.communication_backward + backward + wait_backward,
                weight_grad=one.weight_grad,
                send=send,
            )
    return costs


def _tail(job: Job, machine: Machine, layout: Layout, passes: list[PassSeconds], rank: int) -> tuple[float, float]:
    """After a rank's last backward: the reduction that it could not hide, and the update."""
    state, efficiency = layout.ranks[rank], machine.efficiency
    reduce = messages_seconds(machine, state.data.reduce)
    backward = sum(passes[stage].input_grad + passes[stage].weight_grad for stage in layout.held[rank])
    hidden = efficiency.overlap * backward if job.runtime.overlap_gradients else 0.0
    exposed = max(reduce - hidden, efficiency.tail * reduce) + messages_seconds(machine, state.data.gather)
    return exposed, update_seconds(machine, state.states.optimizer)


def _sharded_seconds(machine: Machine, layout: Layout, passes: list[PassSeconds], rank: int) -> tuple[float, float]:
    """What ZeRO-2 and -3 add to each micro-batch of a rank, forward and backward, after overlap."""
    data, efficiency = layout.ranks[rank].data, machine.efficiency
    forward, backward = messages_seconds(machine, data.forward), messages_seconds(machine, data.backward)
    if not forward and not backward:
        return 0.0, 0.0
    own = [passes[stage] for stage in layout.held[rank]]
    extra = []
    for sent, compute in (
        (forward, sum(p.forward for p in own)),
        (backward, sum(p.input_grad + p.weight_grad + p.recompute for p in own)),
    ):
        hidden = min(sent, efficiency.overlap * compute)
        extra.append(sent - hidden + efficiency.contention * hidden)
    return extra[0], extra[1]
