"""The layout of a plan over a model: the stages and their ranks. Each rank has weights, state,
messages on the data axis, and memory at its peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from plait.plan import ContextAxis, DataAxis, PipelineAxis, Plan, TensorAxis
from plait.plan.precisions import Precision
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
from plait.predict.cost.model.operations import Block
from plait.predict.cost.records import Job, StateRules
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
    shard = job_sharding(job, plan)
    counts = job.counts_of(plan)
    stages = split_model(job.model, plan.pp.num_stages, job.runtime.stage_cut, counts)
    live, placement = live_micro_batches(
        plan.pp.schedule, plan.pp.size, plan.micro_batches, plan.pp.virtual
    )
    held = _held(placement, plan.pp.size)
    inner = inner_plan(plan)
    of_ranks = (tuple(stages[stage] for stage in own) for own in held)
    ranks = tuple(rank_state(own, inner, job.training) for own in of_ranks)
    return PlanLayout(shard, stages, held, live, ranks)


def job_sharding(job: Job, plan: Plan) -> Sharding:
    """How a plan divides the blocks of a job, for its mean micro-batch and its largest."""
    mean, most = job.micro_batch(plan)
    unequal = None if mean == most else most
    return sharding(plan, job.model.seq_len, mean, job.runtime, most_samples=unequal)


@lru_cache(maxsize=1024)
def _held(placement: tuple[int, ...], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(placement):
        held[rank].append(stage)
    return tuple(tuple(stages) for stages in held)


def inner_plan(plan: Plan) -> Plan:
    """The plan reduced to what the state of a rank depends on. Plans that differ in the rest share
    it.
    """
    return _inner((plan.dp, plan.tp, plan.cp), plan.pp.size, plan.ep, plan.precision)


@lru_cache(maxsize=65536)
def _inner(
    axes: tuple[DataAxis, TensorAxis, ContextAxis], pp: int, ep: int, precision: Precision
) -> Plan:
    dp, tp, cp = axes
    return Plan(
        dp=dp, tp=tp, cp=cp, pp=PipelineAxis(pp), ep=ep, precision=precision, micro_batches=1
    )


@lru_cache(maxsize=65536)
def rank_state(stages: tuple[StageBlocks, ...], plan: Plan, training: StateRules) -> RankState:
    """State of a rank with these stages."""
    shard = sharding(plan, 1, 1.0)
    weights = stage_weights(stages, shard, training.tied_parameters)
    width = training.gradient_width(plan.precision)
    parts = plan.optimizer_shards
    blocks = tuple(run for stage in stages for run in stage.runs)
    if plan.dp.strategy == "server" and not training.tied_parameters:
        weights = _with_least_keys(weights, blocks, shard, plan)
    if plan.dp.strategy == "ring":
        weights = replace(weights, padding=ring_padding(blocks, shard, plan.dp.size * plan.cp.size))
    shared = shared_sums(blocks, shard, parts, width)
    if training.adapters.trained:
        return _adapted(weights, plan, training, buckets_of(blocks))
    messages = data_messages(
        plan, weights, width, shared, reduces_whole=training.runtime.reduces_whole
    )
    states = model_states(weights, plan, training.state_numbers, width)
    offloaded = optimizer_bytes(weights, plan, training.state_numbers) if plan.dp.offload else 0.0
    own = updated_numbers(weights, plan)
    sent = buckets_of(blocks, weights.total, training.runtime.bucket_numbers)
    matrices = (
        matrix_update(blocks, shard, plan) if training.optimizer == "muon" else NO_MATRIX_UPDATE
    )
    return RankState(
        weights, messages, states, weights.total * width, own, offloaded, sent, matrices
    )


def _with_least_keys(
    weights: WeightBytes, blocks: tuple[tuple[Block, int], ...], shard: Sharding, plan: Plan
) -> WeightBytes:
    """The weights with the numbers of the parameter servers that own fewest."""
    servers = plan.dp.size * plan.cp.size
    if plan.ep == 1:
        return replace(weights, least_keys=least_keys(blocks, shard, servers))
    return replace(
        weights,
        least_keys=least_keys(blocks, shard, servers, experts=False),
        least_expert_keys=least_keys(blocks, shard, max(1, servers // plan.ep), experts=True),
    )


def _adapted(weights: WeightBytes, plan: Plan, training: StateRules, sent: Buckets) -> RankState:
    """State of a rank whose weights are frozen: adapters alone have gradients and moments.

    ZeRO-3 gathers the frozen weights as well, forward and backward.
    """
    width = training.gradient_width(plan.precision)
    adapters = training.adapters
    trained = weights.times(adapters.trained, adapters.trained_dense, adapters.trained_experts)
    messages = data_messages(plan, trained, width)
    share = adapters.kept_share(plan.precision)
    frozen = data_messages(plan, weights.times(share), width)
    gathers = tuple(one for one in frozen.forward if one.op == "all_gather")
    messages = replace(
        messages,
        forward=(*messages.forward, *gathers),
        backward=(*messages.backward, *gathers),
        first=(*messages.first, *frozen.first),
    )
    states = model_states(trained, plan, training.state_numbers, width)
    base = model_states(weights, plan, training.state_numbers, width)
    states = replace(states, parameters=states.parameters + base.parameters * share)
    offloaded = optimizer_bytes(trained, plan, training.state_numbers) if plan.dp.offload else 0.0
    own = updated_numbers(trained, plan)
    return RankState(weights, messages, states, trained.total * width, own, offloaded, sent)
