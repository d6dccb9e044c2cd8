"""A first guess in tens of microseconds: the estimate of `step`, over the kinds of ranks instead of
over the ranks.

Most ranks of a pipeline hold the same blocks. Equal ranks are computed once, schedules are their
closed forms, traffic is left out. It ranks plans; what is reported is always the full estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from plait.plan import PipelineAxis, Plan
from plait.plan.facts import SCHEDULES, STRATEGIES
from plait.predict.cost.layout import rank_state
from plait.predict.cost.memory.offload import overfull, without_offload
from plait.predict.cost.memory.rank_memory import rank_activations
from plait.predict.cost.model.operations import Model
from plait.predict.cost.records import Job
from plait.predict.cost.sharding import sharding
from plait.predict.cost.step import accumulation_seconds, process_bytes, stage_pass, tail_seconds
from plait.predict.cost.time.closed import closed_live, closed_seconds
from plait.predict.cost.time.gradients import messages_seconds
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.passes import send_seconds
from plait.predict.cost.time.processor import shared_cores
from plait.predict.cost.time.stages import Stage, split_model
from plait.predict.cost.widths import BYTES


@dataclass(frozen=True)
class Guess:
    """A plan with its rough time and memory."""

    plan: Any
    step_seconds: float
    bubble_seconds: float
    memory_bytes: float


@dataclass(frozen=True)
class Kind:
    """Ranks with equal stages: the stages, how many such ranks, and the most live micro-batches of
    each stage.
    """

    stages: tuple[Stage, ...]
    count: int
    live: tuple[int, ...]


@lru_cache(maxsize=8192)
def kinds(
    model: Model, schedule: str, sizes: tuple[int, int, int], balanced: bool
) -> tuple[Kind, ...]:
    """The kinds of ranks of a pipeline; `sizes` is (ranks, stages of a rank, micro-batches)."""
    num_ranks, virtual, micro_batches = sizes
    stages = split_model(model, num_ranks * virtual, balanced)
    live, placement = closed_live(schedule, num_ranks, micro_batches, virtual)
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(placement):
        held[rank].append(stage)
    seen: dict[tuple[Stage, ...], tuple[int, tuple[int, ...]]] = {}
    for own in held:
        key = tuple(stages[stage] for stage in own)
        count, most = seen.get(key, (0, (0,) * len(own)))
        seen[key] = (
            count + 1,
            tuple(max(a, live[stage]) for a, stage in zip(most, own, strict=True)),
        )
    return tuple(Kind(key, count, most) for key, (count, most) in seen.items())


def quick(job: Job, plan: Any, machine: Machine) -> Guess:
    """Rough time and memory of a plan."""
    asked = plan
    plan = without_offload(plan) if machine.is_cpu else plan
    m = plan.micro_batches
    samples = -(-job.global_batch // (plan.dp.size * m))
    shard = sharding(plan, job.model.seq_len, float(samples), job.runtime)
    numerics = job.numerics(plan)
    # Beyond this many the live micro-batches no longer grow, except where all of them live.
    shown = m if SCHEDULES[plan.pp.schedule].holds_all else min(m, 4 * plan.pp.size)
    send = 0.0
    if plan.pp.size > 1:
        stride = plan.dp.size * plan.cp.size * plan.tp.size
        send = send_seconds(machine, shard, job.model.hidden, plan.precision, stride)
    blocking = 0.0 if job.runtime.overlap_sends else 2 * send
    inner = _inner(plan.dp, plan.tp, plan.cp, plan.pp.size, plan.ep, plan.precision)
    slowest = total = tail = host = 0.0
    memory = process = process_bytes(machine)
    for kind in kinds(
        job.model,
        plan.pp.schedule,
        (plan.pp.size, plan.pp.virtual, shown),
        job.runtime.balanced_stages,
    ):
        own = [stage_pass(stage, machine, shard, numerics) for stage in kind.stages]
        state = rank_state(kind.stages, inner, job)
        exposed = sum(
            sum(p.shown(job.runtime.overlap_tensor, job.runtime.overlap_expert)) for p in own
        )
        busy = sum(p.compute + sum(p.waits) for p in own) + exposed + blocking * len(own)
        busy += _sharded(machine, state.data, own) + accumulation_seconds(machine, job, plan, state)
        busy += machine.host.engine["micro_batch"] * len(own) if machine.host is not None else 0.0
        slowest = max(slowest, busy)
        total = total + busy * kind.count
        tail = max(tail, sum(tail_seconds(job, plan, machine, state, own)))
        host = max(host, overfull(machine, plan.world_size, state.host_bytes))
        memory = max(memory, process + _memory(plan, job, kind, state, shard, is_cpu=process > 0))
    seconds = closed_seconds(
        plan.pp.schedule, (plan.pp.size, plan.pp.virtual, m), slowest, total, send
    )
    whole = seconds + tail + machine.efficiency.step_seconds
    if machine.host is not None and plan.world_size > machine.cores:
        work = m * total + plan.pp.size * (tail + machine.efficiency.step_seconds)
        whole = max(
            whole, shared_cores(machine, plan.world_size // plan.pp.size * work, plan.world_size)
        )
    if host > 1.0:
        memory = max(memory, host * machine.memory_bytes)
    return Guess(asked, whole, seconds - m * slowest, memory)


@lru_cache(maxsize=65536)
def _inner(*key: Any) -> Plan:
    """A plan of what the state of a rank depends on, so that plans which differ in the rest share
    it.
    """
    dp, tp, cp, pp, ep, precision = key
    return Plan(
        dp=dp, tp=tp, cp=cp, pp=PipelineAxis(pp), ep=ep, precision=precision, micro_batches=1
    )


def _sharded(machine: Machine, data: Any, own: list[Any]) -> float:
    forward = messages_seconds(machine, data.forward)
    backward = messages_seconds(machine, data.backward)
    if not forward and not backward:
        return 0.0
    efficiency = machine.efficiency
    extra = 0.0
    for sent, compute in (
        (forward, sum(p.forward + p.waits[0] for p in own)),
        (backward, sum(p.input_grad + p.weight_grad + p.recompute + p.waits[1] for p in own)),
    ):
        hidden = min(sent, efficiency.overlap * compute)
        extra += sent - (1.0 - efficiency.contention) * hidden
    return extra


def _memory(plan: Any, job: Job, kind: Kind, state: Any, shard: Any, *, is_cpu: bool) -> float:
    held = tuple(zip(kind.stages, kind.live, strict=True))
    kept, working = rank_activations(held, shard, job.numerics(plan), is_cpu)
    if STRATEGIES[plan.dp.strategy].shards_parameters and plan.dp.size * plan.cp.size > 1:
        working += state.weights.largest_block * (
            2 * BYTES[plan.precision] + job.gradient_width(plan.precision)
        )
    return float(state.states.total + kept + working)
