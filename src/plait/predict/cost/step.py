"""Predict one plan: passes of the stages, the pipeline over them, the data axis and the update.

Everything that two ranks or two plans have in common is computed once: the pieces are cached by
what they depend on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from plait.predict.cost.layout import Layout, RankState, lay_out, rank_memory
from plait.predict.cost.memory import offload
from plait.predict.cost.memory.offload import overfull, without_offload
from plait.predict.cost.memory.rank_memory import PROCESS_BYTES_CPU, usable_bytes
from plait.predict.cost.model.operations import Model
from plait.predict.cost.records import Breakdown, Estimate, Job
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.closed import closed_time
from plait.predict.cost.time.gradients import DataMessages, messages_seconds
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.meetings import meeting_seconds, reduction
from plait.predict.cost.time.passes import PassSeconds, block_pass, send_seconds, update_seconds
from plait.predict.cost.time.pipeline import (
    PipelineTime,
    StageSeconds,
    crowded_seconds,
    pipeline_time,
)
from plait.predict.cost.time.processor import shared_cores
from plait.predict.cost.time.stages import Stage
from plait.predict.cost.traffic import traffic
from plait.predict.cost.widths import BYTES


def estimate_job(job: Job, plan: Any, machine: Machine, closed: bool = False) -> Estimate:
    """Predict one plan. `closed` uses the closed forms of schedules instead of replaying their
    actions.

    The plan's world may be smaller than the machine; prices count the plan's devices.
    """
    asked = plan
    plan = without_offload(plan) if machine.is_cpu else plan
    layout = lay_out(job, plan, closed)
    process = process_bytes(machine)
    memories = tuple(rank_memory(job, plan, layout, rank, process) for rank in range(plan.pp.size))
    pipeline, breakdown, seconds = step_seconds(job, plan, machine, layout, closed)
    return Estimate(
        plan=asked,
        step_seconds=seconds,
        memory=max(memories, key=lambda memory: memory.total),
        memory_limit=usable_bytes(machine, plan),
        traffic=traffic(job, plan, layout.shard, layout.stages, _data_messages(layout)),
        bubble_fraction=pipeline.bubble_fraction,
        tokens=job.global_batch * job.model.seq_len,
        model_flops=3.0 * square_flops(job.model) * job.global_batch,
        num_devices=plan.world_size,
        peak_flops=machine.peak_flops[plan.precision],
        price_per_hour=machine.price_per_hour,
        breakdown=breakdown,
        stage_memory=memories,
        host_overfull=overfull(
            machine, plan.world_size, max(rank.host_bytes for rank in layout.ranks)
        ),
    )


def _data_messages(layout: Layout) -> list[tuple[tuple[int, ...], DataMessages]]:
    return [(own, rank.data) for own, rank in zip(layout.held, layout.ranks, strict=True)]


@lru_cache(maxsize=64)
def square_flops(model: Model) -> float:
    """Forward flops of one sample with the whole square of attention (Chowdhery et al., PaLM,
    appendix B).
    """
    return sum(block.flops(model.seq_len) * count for block, count in model.runs) * model.seq_len


@lru_cache(maxsize=65536)
def stage_pass(
    stage: Stage, machine: Machine, shard: Sharding, numerics: tuple[str, bool, str]
) -> PassSeconds:
    """One micro-batch on one stage; `numerics` is (precision, compiled, recomputation)."""
    total = PassSeconds()
    for block, count in stage.runs:
        total = total.plus(block_pass(block, machine, shard, numerics), count)
    return total


def step_seconds(
    job: Job, plan: Any, machine: Machine, layout: Layout, closed: bool
) -> tuple[PipelineTime, Breakdown, float]:
    """Seconds of a step, with the pipeline's part and the causes."""
    numerics = job.numerics(plan)
    passes = [stage_pass(stage, machine, layout.shard, numerics) for stage in layout.stages]
    sharded = [
        _sharded_seconds(plan, machine, layout, passes, rank) for rank in range(plan.pp.size)
    ]
    costs = _stage_costs(job, plan, machine, layout, passes=passes, sharded=sharded)
    run = closed_time if closed and plan.pp.size > 1 else pipeline_time
    pipeline = run(plan.pp.schedule, plan.pp.size, plan.micro_batches, costs)
    tails = _tails(job, plan, machine, layout, passes)
    end, last = max((pipeline.rank_ends[rank] + sum(tail), rank) for rank, tail in enumerate(tails))
    seconds = end + machine.efficiency.step_seconds
    crowded = _crowded_seconds(plan, machine, costs, pipeline, tails)
    if (
        crowded > seconds
    ):  # more ranks than cores: while one waits another works, and all work must be done
        seconds, waiting = crowded, crowded - seconds
    else:
        waiting = 0.0
    worst = max(range(plan.pp.size), key=lambda rank: pipeline.busy[rank])
    own = [passes[stage] for stage in layout.held[worst]]
    m = plan.micro_batches
    exposed, update = tails[last]
    added = accumulation_seconds(machine, job, plan, layout.ranks[worst])
    parts = {
        "compute": m * (sum(p.compute - p.recompute for p in own) + added),
        "recompute": m * sum(p.recompute for p in own),
        "tensor": m * sum(p.tensor for p in own) * (1.0 - job.runtime.overlap_tensor),
        "context": m * sum(p.context for p in own),
        "expert": m * sum(p.expert for p in own) * (1.0 - job.runtime.overlap_expert),
        "data": exposed + m * sum(sharded[worst]),
        "update": update,
        "host": m * sum(sum(p.waits) for p in own),
        "cores": waiting,
        "other": machine.efficiency.step_seconds,
    }
    return pipeline, Breakdown(bubble=max(0.0, seconds - sum(parts.values())), **parts), seconds


def pass_costs(job: Job, plan: Any, machine: Machine) -> tuple[list[StageSeconds], list[float]]:
    """What a prediction gives its pipeline: the costs of every stage, and the seconds of each
    rank's update and reduction.
    """
    layout = lay_out(job, plan, False)
    passes = [
        stage_pass(stage, machine, layout.shard, job.numerics(plan)) for stage in layout.stages
    ]
    sharded = [
        _sharded_seconds(plan, machine, layout, passes, rank) for rank in range(plan.pp.size)
    ]
    tails = [sum(tail) for tail in _tails(job, plan, machine, layout, passes)]
    return _stage_costs(job, plan, machine, layout, passes=passes, sharded=sharded), tails


def _crowded_seconds(
    plan: Any,
    machine: Machine,
    costs: list[StageSeconds],
    pipeline: PipelineTime,
    tails: list[tuple[float, float]],
) -> float:
    """What the cores need for the work of all ranks, where ranks share them: each pipeline has its
    share of the cores.
    """
    if machine.host is None or plan.world_size <= machine.cores:
        return 0.0
    whole = (
        shared_cores(machine, _work(plan, machine, pipeline, tails), plan.world_size)
        * machine.host.engine["idle"]
    )
    lines = plan.world_size // plan.pp.size
    size = plan.pp.size
    if size == 1:
        return whole
    cores = max(1, machine.cores // lines)
    stretch = max(1.0, lines / machine.cores)
    slower = [
        StageSeconds(
            stretch * one.forward, stretch * one.input_grad, stretch * one.weight_grad, one.send
        )
        for one in costs
    ]
    after = (
        lines * sum(sum(tail) + machine.efficiency.step_seconds for tail in tails) / machine.cores
    )
    return max(
        whole, crowded_seconds(plan.pp.schedule, size, plan.micro_batches, slower, cores) + after
    )


def _work(
    plan: Any, machine: Machine, pipeline: PipelineTime, tails: list[tuple[float, float]]
) -> float:
    work = sum(
        busy + sum(tail) + machine.efficiency.step_seconds
        for busy, tail in zip(pipeline.busy, tails, strict=True)
    )
    return plan.world_size // plan.pp.size * work


def work_seconds(job: Job, plan: Any, machine: Machine) -> float:
    """Seconds that all ranks compute and communicate in a step, added up: waiting is no work."""
    layout = lay_out(job, plan, closed=False)
    passes = [
        stage_pass(stage, machine, layout.shard, job.numerics(plan)) for stage in layout.stages
    ]
    sharded = [
        _sharded_seconds(plan, machine, layout, passes, rank) for rank in range(plan.pp.size)
    ]
    costs = _stage_costs(job, plan, machine, layout, passes=passes, sharded=sharded)
    pipeline = pipeline_time(plan.pp.schedule, plan.pp.size, plan.micro_batches, costs)
    return _work(plan, machine, pipeline, _tails(job, plan, machine, layout, passes))


def _stage_costs(
    job: Job,
    plan: Any,
    machine: Machine,
    layout: Layout,
    *,
    passes: list[PassSeconds],
    sharded: list[tuple[float, float]],
) -> list[StageSeconds]:
    """What the pipeline sees of each stage: compute, exposed communication, waiting for the host,
    and the send.
    """
    stride = plan.dp.size * plan.cp.size * plan.tp.size
    send = (
        send_seconds(machine, layout.shard, job.model.hidden, plan.precision, stride)
        if plan.pp.size > 1
        else 0.0
    )
    blocking = 0.0 if job.runtime.overlap_sends else send
    action = machine.host.engine["micro_batch"] / 2 if machine.host is not None else 0.0
    if machine.host is not None and plan.pp.size > 1:
        action += meeting_seconds(machine, "hand", 2, plan.world_size)
    costs: list[StageSeconds] = [StageSeconds(0.0, 0.0, 0.0)] * len(passes)
    for rank, own in enumerate(layout.held):
        forward, backward = (part / len(own) + blocking for part in sharded[rank])
        add = accumulation_seconds(machine, job, plan, layout.ranks[rank]) / len(own)
        for stage in own:
            one = passes[stage]
            wait_forward, wait_backward = one.waits
            sent_forward, sent_backward = one.shown(
                job.runtime.overlap_tensor, job.runtime.overlap_expert
            )
            costs[stage] = StageSeconds(
                forward=one.forward + sent_forward + forward + wait_forward + action,
                input_grad=one.input_grad
                + one.recompute
                + sent_backward
                + backward
                + wait_backward
                + action,
                weight_grad=one.weight_grad + add,
                send=send,
            )
    return costs


def _tails(
    job: Job, plan: Any, machine: Machine, layout: Layout, passes: list[PassSeconds]
) -> list[tuple[float, float]]:
    """`tail_seconds` of each rank."""
    own = [[passes[stage] for stage in held] for held in layout.held]
    return [
        tail_seconds(job, plan, machine, state, each)
        for state, each in zip(layout.ranks, own, strict=True)
    ]


def tail_seconds(
    job: Job, plan: Any, machine: Machine, state: RankState, own: list[PassSeconds]
) -> tuple[float, float]:
    """After the last backward of a rank that holds `state` and runs `own`: the reduction that it
    could not hide, and the update.
    """
    efficiency = machine.efficiency
    reduce = messages_seconds(machine, state.data.reduce)
    backward = sum(one.input_grad + one.weight_grad + one.waits[1] for one in own)
    hidden = efficiency.overlap * backward if job.runtime.overlap_gradients else 0.0
    exposed = max(reduce - hidden, efficiency.tail * reduce)
    exposed += messages_seconds(machine, state.data.gather) + messages_seconds(
        machine, state.data.shared
    )
    if machine.host is not None:  # a core that computes communicates itself: nothing is hidden
        exposed = reduction(machine, (*state.data.reduce, *state.data.gather), state.buckets, plan)
        exposed += messages_seconds(machine, state.data.shared)
    if plan.dp.offload:
        moved = state.own * (job.gradient_width(plan.precision) + BYTES[plan.precision])
        return exposed, offload.update_seconds(machine, plan.world_size, state.own, moved)
    return exposed, update_seconds(machine, state.states.optimizer, state.gradient_bytes)


def accumulation_seconds(machine: Machine, job: Job, plan: Any, state: RankState) -> float:
    """Seconds of adding a micro-batch's gradients to those before it: each is read and written."""
    if job.runtime.fused_accumulation:
        return 0.0
    numbers = state.states.gradients / job.gradient_width(plan.precision)
    if machine.host is not None:  # the first is copied to where the others are added
        return numbers * machine.host.seconds["add_forward"]
    if plan.micro_batches == 1:
        return 0.0
    return 2.0 * numbers * job.gradient_width(plan.precision) / machine.streaming_rate


def process_bytes(machine: Machine) -> float:
    """What a process takes before it holds any model, where that is part of what is measured: on a
    processor.
    """
    if machine.host is not None:
        return machine.host.memory_bytes
    return PROCESS_BYTES_CPU if machine.is_cpu else 0.0


def _sharded_seconds(
    plan: Any, machine: Machine, layout: Layout, passes: list[PassSeconds], rank: int
) -> tuple[float, float]:
    """What ZeRO-2 and -3 add to each micro-batch of a rank, forward and backward, after overlap."""
    data = layout.ranks[rank].data
    efficiency = machine.efficiency
    if not data.forward and not data.backward:
        return 0.0, 0.0
    if (
        machine.host is not None
    ):  # what is gathered, and gradients that are scattered at once, are new memory each time
        units = layout.ranks[rank].buckets
        fresh = machine.host.seconds["fresh"]
        forward, backward = (
            reduction(machine, part, units, plan) for part in (data.forward, data.backward)
        )
        gathered = sum(one.payload_bytes for one in data.forward) * fresh
        return forward + gathered, backward + sum(
            one.payload_bytes for one in data.backward
        ) * fresh
    forward = messages_seconds(machine, data.forward)
    backward = messages_seconds(machine, data.backward)
    own = [passes[stage] for stage in layout.held[rank]]
    extra = []
    for sent, compute in (
        (forward, sum(p.forward + p.waits[0] for p in own)),
        (backward, sum(p.input_grad + p.weight_grad + p.recompute + p.waits[1] for p in own)),
    ):
        hidden = min(sent, efficiency.overlap * compute)
        extra.append(sent - hidden + efficiency.contention * hidden)
    return extra[0], extra[1]
