"""Bytes that a rank sends in a step, by axis: the same messages that time prices, counted with the ledger's formula."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from plait.cost.gradients import DataMessages
from plait.cost.kernels import BYTES
from plait.cost.messages import block_messages
from plait.cost.operations import Block, Model
from plait.cost.sharding import Sharding
from plait.cost.stages import Stage

AXES = ("dp", "tp", "pp", "cp", "ep")


def traffic(
    model: Model, plan: Any, shard: Sharding, stages: tuple[Stage, ...], ranks: Sequence[tuple[tuple[int, ...], DataMessages]]
) -> dict[str, float]:
    """The largest over the pipeline's ranks, axis by axis; each rank is its stages and its messages on the data axis."""
    totals = dict.fromkeys(AXES, 0.0)
    for own, messages in ranks:
        sent = {"dp": messages.sent_bytes(plan.micro_batches), "pp": _pipeline_bytes(model, plan, shard, own)}
        for stage in own:
            for axis, each in stage_bytes(stages[stage], shard, plan.precision, plan.remat):
                sent[axis] = sent.get(axis, 0.0) + plan.micro_batches * each
        for axis, count in sent.items():
            totals[axis] = max(totals[axis], count)
    return totals


@lru_cache(maxsize=65536)
def stage_bytes(stage: Stage, shard: Sharding, precision: str, remat: str) -> tuple[tuple[str, float], ...]:
    """Bytes of one micro-batch on one stage on the axes inside layers."""
    sent: dict[str, float] = {}
    for block, count in stage.runs:
        for message in block_messages(block, shard, precision):
            times = count * (2 if message.when == "forward" and _repeats(block, remat) else 1)
            sent[message.axis] = sent.get(message.axis, 0.0) + times * message.sent_bytes
    return tuple(sent.items())


def _repeats(block: Block, remat: str) -> bool:
    return remat == "full" and block.name not in {"head", "embedding"}


def _pipeline_bytes(model: Model, plan: Any, shard: Sharding, own: tuple[int, ...]) -> float:
    """Activations forward and gradients backward over each border between stages of different ranks."""
    if plan.pp.size == 1:
        return 0.0
    payload = shard.tokens * model.hidden * BYTES[plan.precision] / shard.sequence_split
    last, mine = plan.pp.num_stages - 1, set(own)
    borders = sum(stage < last and stage + 1 not in mine for stage in own) + sum(
        stage > 0 and stage - 1 not in mine for stage in own
    )
    return plan.micro_batches * borders * payload
