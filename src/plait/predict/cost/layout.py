"""The layout of a plan over a model: the stages and their ranks. Each rank has weights, state,
messages on the data axis, and memory at its peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from plait.plan import Plan
from plait.predict.cost.matrices import NO_MATRIX_UPDATE, MatrixUpdate, matrix_update
from plait.predict.cost.memory.local_sizes import least_keys, ring_padding, shared_sums
from plait.predict.cost.memory.rank_memory import (
    RankMemory,
    WeightBytes,
    model_states,
    optimizer_bytes,
    stage_weights,
    updated_numbers,
)
from plait.predict.cost.records import Job
from plait.predict.cost.sharding import Sharding, sharding
from plait.predict.cost.time.gradients import Buckets, DataMessages, buckets_of, data_messages
from plait.predict.cost.time.pipeline import live_micro_batches
from plait.predict.cost.time.stages import StageBlocks, split_model


@dataclass(frozen=True)
class RankState:
    """State of one pipeline rank: weights, and messages on the data axis."""

    weights: WeightBytes
    data: DataMessages
    states: RankMemory
    gradient_bytes: float
    """Before any data axis divides them."""
    own: float
    """Weights that it updates."""
    host_bytes: float
    """Optimizer state that is on the host."""
    buckets: Buckets
    """Buckets in which the data axis sends gradients or weights."""
    matrices: MatrixUpdate = NO_MATRIX_UPDATE
    """Matrices that the optimizer needs whole."""


@dataclass(frozen=True)
class PlanLayout:
    """A plan laid over a model: its stages, who holds them, and what each rank holds."""

    shard: Sharding
    stages: tuple[StageBlocks, ...]
    held: tuple[tuple[int, ...], ...]
    """Stages of each rank."""
    live: tuple[int, ...]
    """Live micro-batches of each stage at the peak of its rank."""
    ranks: tuple[RankState, ...]

    def live_stages(self, rank: int) -> tuple[tuple[StageBlocks, int], ...]:
        """The stages of a rank, each with its live micro-batches."""
        return tuple((self.stages[stage], self.live[stage]) for stage in self.held[rank])


def lay_out(job: Job, plan: Plan) -> PlanLayout:
    """The stages of a plan and what each rank holds."""
    samples = job.largest_micro_batch(plan)
    shard = sharding(plan, job.model.seq_len, float(samples), job.runtime)
    counts = job.counts_of(plan)
    stages = split_model(job.model, plan.pp.num_stages, job.runtime.balanced_stages, counts)
    live, placement = live_micro_batches(
        plan.pp.schedule, plan.pp.size, plan.micro_batches, plan.pp.virtual
    )
    held = _held(placement, plan.pp.size)
    ranks = tuple(rank_state(tuple(stages[stage] for stage in own), plan, job) for own in held)
    return PlanLayout(shard, stages, held, live, ranks)


@lru_cache(maxsize=1024)
def _held(placement: tuple[int, ...], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(placement):
        held[rank].append(stage)
    return tuple(tuple(stages) for stages in held)


@lru_cache(maxsize=65536)
def rank_state(stages: tuple[StageBlocks, ...], plan: Plan, job: Job) -> RankState:
    """State of a rank with these stages."""
    shard = sharding(plan, 1, 1.0)
    weights = stage_weights(stages, shard, job.model.tied_parameters)
    width = job.gradient_width(plan.precision)
    parts = plan.optimizer_shards
    blocks = tuple(run for stage in stages for run in stage.runs)
    if plan.dp.strategy == "server" and not job.model.tied_parameters:
        weights = replace(
            weights, least_keys=least_keys(blocks, shard, plan.dp.size * plan.cp.size)
        )
    if plan.dp.strategy == "ring":
        weights = replace(weights, padding=ring_padding(blocks, shard, plan.dp.size * plan.cp.size))
    shared = shared_sums(blocks, shard, parts, width)
    if job.adapters:
        return _adapted(weights, plan, job, buckets_of(blocks))
    messages = data_messages(plan, weights, width, shared, reduces_whole=job.runtime.reduces_whole)
    states = model_states(weights, plan, job.state_numbers, width)
    offloaded = optimizer_bytes(weights, plan, job.state_numbers) if plan.dp.offload else 0.0
    own = updated_numbers(weights, plan)
    sent = buckets_of(blocks, weights.total, job.runtime.bucket_numbers)
    matrices = matrix_update(blocks, shard, plan) if job.optimizer == "muon" else NO_MATRIX_UPDATE
    return RankState(
        weights, messages, states, weights.total * width, own, offloaded, sent, matrices
    )


def _adapted(weights: WeightBytes, plan: Plan, job: Job, sent: Buckets) -> RankState:
    """State of a rank whose weights are frozen: adapters alone have gradients and moments.

    ZeRO-3 gathers the frozen weights as well, forward and backward.
    """
    width = job.gradient_width(plan.precision)
    trained = WeightBytes(
        weights.dense * job.adapters,
        weights.experts * job.adapters,
        weights.largest_block * job.adapters,
    )
    messages = data_messages(plan, trained, width)
    frozen = data_messages(plan, weights, width)
    gathers = tuple(one for one in frozen.forward if one.op == "all_gather")
    messages = replace(
        messages,
        forward=(*messages.forward, *gathers),
        backward=(*messages.backward, *gathers),
    )
    states = model_states(trained, plan, job.state_numbers, width)
    base = model_states(weights, plan, job.state_numbers, width)
    states = replace(states, parameters=states.parameters + base.parameters)
    offloaded = optimizer_bytes(trained, plan, job.state_numbers) if plan.dp.offload else 0.0
    own = updated_numbers(trained, plan)
    return RankState(weights, messages, states, trained.total * width, own, offloaded, sent)
