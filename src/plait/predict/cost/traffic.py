"""Bytes that a rank sends in a step, by axis. They are the messages that time prices, counted with
the ledger's formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from plait.comm.transitions import bytes_sent
from plait.plan import Plan
from plait.plan.axes import Remat
from plait.plan.facts import SCHEDULES
from plait.predict.cost.layout import RankState
from plait.predict.cost.memory.local_sizes import tied_split
from plait.predict.cost.records import Job
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.messages import block_messages
from plait.predict.cost.time.passes import sent_again
from plait.predict.cost.time.stages import StageBlocks
from plait.predict.cost.widths import BYTES

COUNT_BYTES = 8
AXES = ("dp", "tp", "pp", "cp", "ep")


def traffic(
    job: Job,
    plan: Plan,
    shard: Sharding,
    stages: tuple[StageBlocks, ...],
    ranks: Sequence[tuple[tuple[int, ...], RankState]],
) -> dict[str, float]:
    """The largest over the pipeline's ranks, axis by axis. Each rank is its stages and its
    state.
    """
    totals = dict.fromkeys(AXES, 0.0)
    placement = {stage: rank for rank, (own, _) in enumerate(ranks) for stage in own}
    for own, state in ranks:
        messages = state.data
        sent = {
            "dp": messages.sent_bytes(plan.micro_batches) + state.matrices.sent_bytes,
            "pp": _pipeline_bytes(job, plan, shard, own, placement),
        }
        sent["tp"] = sum(message.sent_bytes for message in messages.shared)
        for stage in own:
            for size, count in shard.by_size(plan.micro_batches):
                for axis, each in stage_bytes(stages[stage], size, plan.precision, plan.remat):
                    sent[axis] = sent.get(axis, 0.0) + count * each
        for axis, in_all in sent.items():
            totals[axis] = max(totals[axis], in_all)
    return totals


@lru_cache(maxsize=65536)
def stage_bytes(
    stage: StageBlocks, shard: Sharding, precision: str, remat: Remat
) -> tuple[tuple[str, float], ...]:
    """Bytes of one micro-batch on one stage on the axes inside layers."""
    sent: dict[str, float] = {}
    for block, count, word in stage.recomputed(remat):
        for message in block_messages(block, shard, precision):
            times = count * (2 if sent_again(block, message, shard, word) else 1)
            sent[message.axis] = sent.get(message.axis, 0.0) + times * message.sent_bytes
    return tuple(sent.items())


def _pipeline_bytes(
    job: Job, plan: Plan, shard: Sharding, own: tuple[int, ...], placement: dict[int, int]
) -> float:
    """Activations forward and gradients backward over each border between stages of different
    ranks. Gradients of weights that the first and the last stage share are included.
    """
    if plan.pp.size == 1:
        return 0.0
    width = shard.message_width(BYTES[plan.precision])
    tokens = sum(count * size.tokens for size, count in shard.by_size(plan.micro_batches))
    payload = tokens * job.model.hidden * width / shard.sequence_split
    last = plan.pp.num_stages - 1
    own_stages = set(own)
    forward = sum(stage < last and stage + 1 not in own_stages for stage in own)
    backward = sum(stage > 0 and stage - 1 not in own_stages for stage in own)
    sent = (forward + backward) * payload
    if SCHEDULES[
        plan.pp.schedule
    ].asynchronous:  # each gradient says of how many tokens it is, and a step's loss is sent to all
        sent += plan.micro_batches * backward * COUNT_BYTES + bytes_sent(
            "broadcast", 3 * COUNT_BYTES, plan.pp.size
        )
    tied = job.model.tied_parameters
    if tied and (0 in own_stages or last in own_stages) and placement[0] != placement[last]:
        split = tied_split((block for block, _ in job.model.runs), shard)
        parts = split * plan.optimizer_shards
        sent += -(-tied // parts) * job.gradient_width(plan.precision)
    return sent
