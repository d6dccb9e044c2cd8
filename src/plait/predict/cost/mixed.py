"""Predict one plan on several kinds of device: each kind has its own data ranks or stages.

Without a pipeline the kinds divide the data ranks. Each works on its own share of the samples, and
the slowest ends the step. With a pipeline they divide the stages, and the schedule is replayed with
each stage's own seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.cluster.mixed import MixedCluster
from plait.errors import PlanError, WorldSizeError
from plait.plan import Plan
from plait.predict.cost.bars import reach
from plait.predict.cost.layout import lay_out
from plait.predict.cost.machines import machine_of
from plait.predict.cost.ranks import Question, Rank, rank_memory
from plait.predict.cost.records import Estimate, Job
from plait.predict.cost.step import PredictedStep, estimate_job
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.pipeline import StageSeconds, pipeline_time


def machines_of(mixed: MixedCluster) -> tuple[Machine, ...]:
    """The machine of each kind."""
    return tuple(replace(machine_of(part), num_devices=mixed.num_devices) for part in mixed.parts)


def check_one_link(job: Job, mixed: MixedCluster) -> None:
    """Raises `PlanError` for activations in host memory, which one kind of device is known for."""
    if job.offload_activations:
        raise PlanError(
            f"offload_activations is predicted for one kind of device, and {mixed.name} has "
            f"{len(mixed.parts)}; leave it out"
        )


def estimate_mixed(
    job: Job, plan: Plan, mixed: MixedCluster, machines: Sequence[Machine]
) -> Estimate:
    """The prediction for a plan of all devices; `machines` are those of `machines_of`.

    Raises `WorldSizeError` for a plan of another number of ranks. Raises `PlanError` where a data
    rank or a stage would have devices of two kinds.
    """
    if plan.remat == "auto":
        raise PlanError(
            f"plan '{plan}': remat:auto chooses for one kind of device, and {mixed.name} has "
            f"{len(mixed.parts)}; write remat:selective or remat:full"
        )
    check_one_link(job, mixed)
    if job.kept and job.kept != "auto":
        raise PlanError(
            f"plan.keep_gathered is priced for one kind of device, and {mixed.name} has "
            f"{len(mixed.parts)}; leave it out"
        )
    job = replace(job, kept=None)
    if plan.world_size != mixed.num_devices:
        raise WorldSizeError(
            f"plan '{plan}' has {plan.world_size} ranks and {mixed.name} {mixed.num_devices} "
            "devices; on a mixed cluster a plan takes all of them"
        )
    groups = plan.pp.size if plan.pp.size > 1 else plan.dp.size
    kinds = mixed.kinds(plan.world_size // groups)
    if kinds is None:
        word = "stage" if plan.pp.size > 1 else "data rank"
        raise PlanError(
            f"plan '{plan}': a {word} of {plan.world_size // groups} devices would have two kinds "
            f"of {mixed.name}; each part must be a multiple of that"
        )
    if plan.pp.size > 1:
        found = _staged(job, plan, [machines[kind] for kind in kinds])
    else:
        found = _shared(job, plan, kinds, machines)
    return _whole(found, job, plan, machines, mixed)


def _shared(job: Job, plan: Plan, kinds: list[int], machines: Sequence[Machine]) -> Estimate:
    """The slowest kind's step, with the memory of the fullest."""
    size = plan.dp.size
    shares = job.shares if len(job.shares) == size else (1,) * size
    steps = []
    for kind, machine in enumerate(machines):
        share = max(one for one, own in zip(shares, kinds, strict=True) if own == kind)
        samples = -(-job.global_batch * share // (sum(shares) * plan.micro_batches))
        own_job = replace(job, shares=(), global_batch=samples * plan.micro_batches * size)
        steps.append(estimate_job(own_job, plan, machine))
    slowest = max(steps, key=lambda one: one.step_seconds)
    fullest = max(steps, key=lambda one: one.memory.total / one.memory_limit)
    return replace(
        slowest,
        memory=fullest.memory,
        memory_limit=fullest.memory_limit,
        stage_memory=fullest.stage_memory,
        host_overfull=max(one.host_overfull for one in steps),
    )


def _staged(job: Job, plan: Plan, machines: Sequence[Machine]) -> Estimate:
    """The replay of a pipeline whose ranks are of the given machines."""
    layout = lay_out(job, plan)
    questions = [Question(job, plan, machine, layout.shard) for machine in machines]
    send = max(question.send_seconds() for question in questions)
    ranks = []
    costs = [StageSeconds(0.0, 0.0, 0.0)] * len(layout.stages)
    for question, state, held in zip(questions, layout.ranks, layout.held, strict=True):
        passes = question.passes([layout.stages[stage] for stage in held])
        rank = Rank(question, state, tuple(passes))
        ranks.append(rank)
        for stage, cost in zip(held, rank.stage_costs(send), strict=True):
            costs[stage] = cost
    pipeline = pipeline_time(plan.pp.schedule, plan.pp.size, plan.micro_batches, costs)
    tails = tuple(rank.tail_seconds() for rank in ranks)
    step = PredictedStep(questions[0], tuple(ranks), tuple(costs), tails, pipeline)
    memories = [
        rank_memory(question, layout.ranks[index], question.activations(layout.live_stages(index)))
        for index, question in enumerate(questions)
    ]
    limits = [machine.memory.usable_bytes(plan) for machine in machines]
    fullest = max(range(len(limits)), key=lambda index: memories[index].total / limits[index])
    return replace(
        estimate_job(job, plan, machines[0]),
        step_seconds=step.seconds,
        breakdown=step.breakdown(),
        bubble_fraction=pipeline.bubble_fraction,
        memory=memories[fullest],
        memory_limit=limits[fullest],
        stage_memory=tuple(memories),
    )


def _whole(
    found: Estimate, job: Job, plan: Plan, machines: Sequence[Machine], mixed: MixedCluster
) -> Estimate:
    """The prediction with the numbers of the whole cluster: tokens, flops, peak and price."""
    per_sample = found.model_flops / found.tokens * job.model.seq_len
    causal = found.causal_flops / found.tokens * job.model.seq_len
    sizes = [part.num_devices / mixed.num_devices for part in mixed.parts]
    size = plan.dp.size
    return replace(
        found,
        tokens=job.global_batch * job.model.seq_len,
        model_flops=per_sample * job.global_batch,
        causal_flops=causal * job.global_batch,
        num_devices=mixed.num_devices,
        peak_flops=sum(
            part * machine.peak_flops[plan.precision]
            for part, machine in zip(sizes, machines, strict=True)
        ),
        price_per_hour=sum(
            part * machine.price_per_hour for part, machine in zip(sizes, machines, strict=True)
        ),
        power_watts=sum(
            part * machine.power_watts for part, machine in zip(sizes, machines, strict=True)
        ),
        shares=job.shares if len(job.shares) == size and len(set(job.shares)) > 1 else (),
        counts=job.counts if len(job.counts) == plan.pp.num_stages and plan.pp.size > 1 else (),
        reach=reach(mixed.num_devices, min(one.devices_per_node for one in machines)),
    )
