"""The answer: step time, memory, traffic, bubble and price of one plan for one model on one cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.cost.gradients import DataMessages, data_messages, messages_seconds
from plait.cost.kernels import BYTES
from plait.cost.machine import Machine
from plait.cost.memory import Memory, Weights, block_activations, model_states, stage_weights
from plait.cost.messages import block_messages
from plait.cost.operations import Model
from plait.cost.pipeline import PipelineTime, StageSeconds, live_micro_batches, pipeline_time
from plait.cost.sharding import Sharding, sharding
from plait.cost.stages import Stage, split_model
from plait.cost.time import PassSeconds, block_pass, send_seconds, update_seconds


@dataclass(frozen=True)
class Runtime:
    """How the framework behaves that runs a plan. The defaults are plait's; published runs of others set what they do."""

    gradient_bytes: float | None = None
    """Width of a gradient; None: as wide as the weights."""
    overlap_gradients: bool = True
    """Gradients are reduced while the last backward runs."""
    overlap_sends: bool = True
    """A stage computes on while it sends to its neighbour."""
    balanced_stages: bool = True
    """Stages are cut by cost, not by equal numbers of layers."""
    overlap_tensor: float = 0.0
    """The part of tensor-parallel communication that is split and hidden behind its own matrix product."""


@dataclass(frozen=True)
class Job:
    """What is to be run: model, samples a step, optimizer, and the runtime."""

    model: Model
    global_batch: int
    optimizer: str = "adamw"
    runtime: Runtime = field(default_factory=Runtime)

    def gradient_width(self, precision: str) -> float:
        """Bytes of a gradient."""
        return self.runtime.gradient_bytes or BYTES[precision]


@dataclass(frozen=True)
class Breakdown:
    """Seconds of the slowest rank by cause; they add up to the step."""

    compute: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    update: float = 0.0
    host: float = 0.0
    other: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """The causes by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Estimate:
    """A prediction. `as_dict` has the keys of `plait estimate --json`."""

    plan: Any
    step_seconds: float
    memory: Memory
    memory_limit: float
    traffic: Mapping[str, float]
    bubble_fraction: float
    tokens: int
    model_flops: float
    num_devices: int
    peak_flops: float
    price_per_hour: float
    breakdown: Breakdown = field(default_factory=Breakdown)
    stage_memory: tuple[Memory, ...] = ()
    """Of each pipeline rank."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.memory.total <= self.memory_limit

    @property
    def tokens_per_second(self) -> float:
        """Tokens (or samples, where a sample has no sequence) a second over all devices."""
        return self.tokens / self.step_seconds

    @property
    def tflops_per_device(self) -> float:
        """Model flops (three forwards, the whole attention square, no recomputation) a second and device, in 1e12."""
        return self.model_flops / self.step_seconds / self.num_devices / 1e12

    @property
    def cost_per_million_tokens(self) -> float:
        """In the currency of the cluster's price."""
        return self.price_per_hour / 3600 * self.num_devices / self.tokens_per_second * 1e6

    def as_dict(self) -> dict[str, Any]:
        """The contract's keys, SI units."""
        return {
            "plan": str(self.plan),
            "fits": self.fits,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second / self.num_devices,
            "tflops_per_device": self.tflops_per_device,
            "mfu": self.tflops_per_device * 1e12 / self.peak_flops,
            "bubble_fraction": self.bubble_fraction,
            "memory": self.memory.as_dict(),
            "memory_limit": self.memory_limit,
            "traffic": dict(self.traffic),
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "breakdown_seconds": self.breakdown.as_dict(),
        }


@dataclass(frozen=True)
class _Rank:
    """What one pipeline rank holds and does."""

    stages: tuple[int, ...]
    weights: Weights
    data: DataMessages


def estimate_job(job: Job, plan: Any, machine: Machine) -> Estimate:
    """Predict one plan. The plan's world may be smaller than the machine; prices count the plan's devices."""
    shard = sharding(plan, job.model.seq_len, job.global_batch / (plan.dp.size * plan.micro_batches))
    stages = split_model(job.model, plan.pp.num_stages, job.runtime.balanced_stages)
    numerics = (plan.precision, plan.compile, plan.remat)
    passes = [stage_pass(stage, machine, shard, numerics) for stage in stages]
    live, placement = live_micro_batches(plan.pp.schedule, plan.pp.size, plan.micro_batches, plan.pp.virtual)
    ranks = _ranks(job, plan, shard, stages, placement)
    memories = tuple(_memory(job, plan, shard, stages, rank, live) for rank in ranks)
    pipeline, breakdown, seconds = _step_seconds(job, plan, machine, passes, ranks)
    fullest = max(memories, key=lambda memory: memory.total)
    return Estimate(
        plan=plan,
        step_seconds=seconds,
        memory=fullest,
        memory_limit=machine.memory_bytes,
        traffic=traffic(job, plan, shard, stages, ranks),
        bubble_fraction=pipeline.bubble_fraction,
        tokens=job.global_batch * job.model.seq_len,
        model_flops=3.0 * _square_flops(job.model) * job.global_batch,
        num_devices=plan.world_size,
        peak_flops=machine.peak_flops[plan.precision],
        price_per_hour=machine.price_per_hour,
        breakdown=breakdown,
        stage_memory=memories,
    )


def _square_flops(model: Model) -> float:
    return sum(block.flops(model.seq_len) * count for block, count in model.runs) * model.seq_len


def stage_pass(stage: Stage, machine: Machine, shard: Sharding, numerics: tuple[str, bool, str]) -> PassSeconds:
    """One micro-batch on one stage."""
    total = PassSeconds()
    for block, count in stage.runs:
        total = total.plus(block_pass(block, machine, shard, numerics), count)
    return total


def _ranks(job: Job, plan: Any, shard: Sharding, stages: tuple[Stage, ...], placement: tuple[int, ...]) -> list[_Rank]:
    ranks = []
    for rank in range(plan.pp.size):
        own = tuple(stage for stage, holder in enumerate(placement) if holder == rank)
        weights = stage_weights(tuple(stages[stage] for stage in own), shard, job.model.tied_parameters)
        ranks.append(_Rank(own, weights, data_messages(plan, weights, job.gradient_width(plan.precision))))
    return ranks


def _memory(job: Job, plan: Any, shard: Sharding, stages: tuple[Stage, ...], rank: _Rank, live: tuple[int, ...]) -> Memory:
    states = model_states(rank.weights, plan, job.optimizer, job.gradient_width(plan.precision))
    activations = working = 0.0
    for stage in rank.stages:
        for block, count in stages[stage].runs:
            kept = block_activations(block, shard, plan.precision, plan.remat)
            # The head's logits are freed by the backward that follows them at once.
            activations += kept * count * (1 if block.name == "head" else live[stage])
            if plan.remat == "full":
                working = max(working, block_activations(block, shard, plan.precision, "none"))
    buffers = 0.0
    if plan.dp.strategy == "zero3":
        buffers += 2 * rank.weights.largest_block * (BYTES[plan.precision] + job.gradient_width(plan.precision) / 2)
    return Memory(states.parameters, states.gradients, states.optimizer, activations + working, buffers)


def _step_seconds(
    job: Job, plan: Any, machine: Machine, passes: list[PassSeconds], ranks: list[_Rank]
) -> tuple[PipelineTime, Breakdown, float]:
    shard = sharding(plan, job.model.seq_len, job.global_batch / (plan.dp.size * plan.micro_batches))
    efficiency = machine.efficiency
    stride = plan.dp.size * plan.cp.size * plan.tp.size
    send = send_seconds(machine, shard, job.model.hidden, plan.precision, stride) if plan.pp.size > 1 else 0.0
    sharded = {stage: _sharded_seconds(machine, rank, passes) for rank in ranks for stage in rank.stages}
    costs = []
    for index, one in enumerate(passes):
        extra_forward, extra_backward = sharded[index]
        if not job.runtime.overlap_sends:
            extra_forward, extra_backward = extra_forward + send, extra_backward + send
        shown = 1.0 - job.runtime.overlap_tensor
        costs.append(
            StageSeconds(
                forward=one.forward + shown * one.communication_forward + extra_forward + one.waits[0],
                input_grad=one.input_grad + one.recompute + shown * one.communication_backward + extra_backward + one.waits[1],
                weight_grad=one.weight_grad,
                send=send,
            )
        )
    pipeline = pipeline_time(plan.pp.schedule, plan.pp.size, plan.micro_batches, costs)
    tails = []
    for index, rank in enumerate(ranks):
        last_backward = sum(passes[stage].input_grad + passes[stage].weight_grad for stage in rank.stages)
        reduce = messages_seconds(machine, rank.data.reduce)
        hidden = efficiency.overlap * last_backward if job.runtime.overlap_gradients else 0.0
        exposed = max(reduce - hidden, 0.1 * reduce) + messages_seconds(machine, rank.data.gather)
        states = model_states(rank.weights, plan, job.optimizer, job.gradient_width(plan.precision))
        update = update_seconds(machine, states.optimizer / 12, states.optimizer)
        tails.append((pipeline.rank_ends[index] + exposed + update, exposed, update))
    end, exposed, update = max(tails)
    seconds = end + efficiency.step_seconds
    worst = max(range(len(ranks)), key=lambda index: pipeline.busy[index])
    own = [passes[stage] for stage in ranks[worst].stages]
    m = plan.micro_batches
    parts = {
        "compute": m * sum(p.compute - p.recompute for p in own),
        "recompute": m * sum(p.recompute for p in own),
        "tensor": m * sum(p.tensor for p in own) * (1.0 - job.runtime.overlap_tensor),
        "context": m * sum(p.context for p in own),
        "expert": m * sum(p.expert for p in own),
        "data": exposed + m * sum(sum(sharded[stage]) for stage in ranks[worst].stages),
        "update": update,
        "host": m * sum(sum(p.waits) for p in own),
        "other": efficiency.step_seconds,
    }
    return pipeline, Breakdown(bubble=max(0.0, seconds - sum(parts.values())), **parts), seconds


def _sharded_seconds(machine: Machine, rank: _Rank, passes: list[PassSeconds]) -> tuple[float, float]:
    """What ZeRO-2 and -3 add to each micro-batch of each stage of a rank, forward and backward, after overlap."""
    efficiency = machine.efficiency
    forward, backward = messages_seconds(machine, rank.data.forward), messages_seconds(machine, rank.data.backward)
    if not forward and not backward:
        return 0.0, 0.0
    compute_forward = sum(passes[stage].forward for stage in rank.stages)
    compute_backward = sum(passes[stage].input_grad + passes[stage].weight_grad + passes[stage].recompute for stage in rank.stages)
    share = 1.0 / len(rank.stages)
    extra = []
    for sent, compute in ((forward, compute_forward), (backward, compute_backward)):
        hidden = min(sent, efficiency.overlap * compute)
        extra.append((sent - hidden + efficiency.contention * hidden) * share)
    return extra[0], extra[1]


def traffic(job: Job, plan: Any, shard: Sharding, stages: tuple[Stage, ...], ranks: list[_Rank]) -> dict[str, float]:
    """Bytes that a rank sends in a step, by axis: the largest over the pipeline's ranks."""
    totals: dict[str, float] = {}
    for index, rank in enumerate(ranks):
        own = {"dp": rank.data.sent_bytes(plan.micro_batches), "pp": _pipeline_bytes(job, plan, shard, rank, len(stages))}
        for stage in rank.stages:
            for block, count in stages[stage].runs:
                again = 2 if plan.remat == "full" and block.name not in {"head", "embedding"} else 1
                for message in block_messages(block, shard, plan.precision):
                    times = count * plan.micro_batches * (again if message.when == "forward" else 1)
                    own[message.axis] = own.get(message.axis, 0.0) + times * message.sent_bytes
        for axis, sent in own.items():
            totals[axis] = max(totals.get(axis, 0.0), sent)
    return {axis: totals.get(axis, 0.0) for axis in ("dp", "tp", "pp", "cp", "ep")}


def _pipeline_bytes(job: Job, plan: Any, shard: Sharding, rank: _Rank, num_stages: int) -> float:
    """Activations forward and gradients backward over each border between stages of different ranks."""
    if plan.pp.size == 1:
        return 0.0
    payload = shard.tokens * job.model.hidden * BYTES[plan.precision] / shard.sequence_split
    own = set(rank.stages)
    borders = sum(stage + 1 < num_stages and stage + 1 not in own for stage in own)
    borders += sum(stage > 0 and stage - 1 not in own for stage in own)
    return plan.micro_batches * borders * payload
