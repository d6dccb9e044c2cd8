"""The data axis: messages of a step for gradients and weights, and how much of them backward cannot
hide.

With B bytes of weights on N ranks and M micro-batches, a rank sends 2(N-1)/N B for all-reduce, ring
and ZeRO-1. ZeRO-2 scatters after every micro-batch: (M+1)(N-1)/N B. ZeRO-3 also gathers for forward
and for backward: 3M(N-1)/N B.

Under ZeRO-3 K bytes may stay whole until the step ends. For them it is (M+1)(N-1)/N K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from plait.plan import Plan
from plait.plan.facts import STRATEGIES
from plait.predict.cost.memory.rank_memory import WeightBytes
from plait.predict.cost.model.operations import Block, Elementwise, Lookup, Matmul
from plait.predict.cost.time.messages import Message
from plait.predict.cost.widths import BYTES


@lru_cache(maxsize=4096)
def num_tensors(block: Block) -> int:
    """Parameters of a block, each a tensor."""
    number = 0
    for op in block.operations:
        if isinstance(op, Matmul) and not op.weightless:
            number += (len(op.parts) or 1) * (2 if op.bias else 1)
        elif isinstance(op, Elementwise) and op.parameters:
            number += 2 if "norm" in op.name and op.statistics != 1 else 1
        elif isinstance(op, Lookup):
            number += 1
    return number


@dataclass(frozen=True)
class Buckets:
    """How many a data axis sends what a rank holds in, and the parameters in them all."""

    number: int
    tensors: int
    blocks: int
    """Blocks, which are gathered one by one where parameters are sharded."""


def buckets_of(
    runs: Sequence[tuple[Block, int]], numbers: float = 0.0, most: float | None = None
) -> Buckets:
    """A bucket for each block, or as many as `numbers` weights fill with `most` in each."""
    blocks = sum(count for _, count in runs)
    tensors = sum(count * num_tensors(block) for block, count in runs)
    filled = blocks if most is None else max(1, round(numbers / most))
    return Buckets(filled, tensors, blocks)


@dataclass(frozen=True)
class DataMessages:
    """The collectives of the data axis on one rank. Some are for each micro-batch in forward and
    backward, others once for a step.
    """

    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()
    reduce: tuple[Message, ...] = ()
    """Once a step, ready while the last backward runs."""
    gather: tuple[Message, ...] = ()
    """Once a step, after the update."""
    first: tuple[Message, ...] = ()
    """Once a step, in the first forward: what then stays whole."""
    shared: tuple[Message, ...] = ()
    """Once a step, on the tensor axis: gradients of parameters that its ranks share (see
    `plait.predict.cost.memory.local_sizes`).
    """

    def plus(self, other: DataMessages) -> DataMessages:
        """The messages of two sets of parameters of the rank."""
        return DataMessages(
            self.forward + other.forward,
            self.backward + other.backward,
            self.reduce + other.reduce,
            self.gather + other.gather,
            self.first + other.first,
            self.shared + other.shared,
        )

    def sent_bytes(self, micro_batches: int) -> float:
        """Bytes that one rank sends in a step."""
        each = sum(message.sent_bytes for message in (*self.forward, *self.backward))
        return micro_batches * each + sum(
            message.sent_bytes for message in (*self.reduce, *self.gather, *self.first)
        )


def data_messages(
    plan: Plan,
    weights: WeightBytes,
    gradient_bytes: float,
    shared: tuple[Message, ...] = (),
    *,
    reduces_whole: bool = False,
) -> DataMessages:
    """The collectives of a plan's data axis for a rank that holds `weights`; `shared` are those of
    the tensor axis.
    """
    size = plan.dp.size * plan.cp.size
    keys = weights.least_keys if weights.least_keys is not None else weights.total / size
    dense = weights.dense + weights.padding
    kept = (weights.kept_dense, weights.kept_share)
    messages = _part(plan, dense, gradient_bytes, size, plan.tp.size, keys=keys, kept=kept)
    if weights.experts:
        ranks = max(1, plan.dp.size * plan.cp.size // plan.ep)
        stride = plan.tp.size * plan.ep
        kept = (weights.kept_experts, weights.kept_share)
        keys = weights.least_expert_keys
        experts = _part(plan, weights.experts, gradient_bytes, ranks, stride, keys=keys, kept=kept)
        messages = messages.plus(experts)
    if reduces_whole and STRATEGIES[plan.dp.strategy].zero_stage == 1:
        whole = tuple(replace(one, op="all_reduce") for one in messages.reduce)
        messages = replace(messages, reduce=whole)
    return replace(messages, shared=shared)


def _part(
    plan: Plan,
    numbers: float,
    gradient_bytes: float,
    size: int,
    stride: int,
    *,
    keys: float = 0.0,
    kept: tuple[float, float] = (0.0, 0.0),
) -> DataMessages:
    """The messages of `numbers` weights. `kept` are those that stay whole once they are gathered,
    and the part of the blocks that they are.
    """
    if size <= 1:
        return DataMessages()
    strategy = plan.dp.strategy
    replicate = plan.dp.replicate
    shard = max(1, size // replicate)
    gradients = numbers * gradient_bytes
    weights = numbers * BYTES[plan.precision]

    def message(
        op: str, payload_bytes: float, ranks: int = shard, apart: int = stride
    ) -> tuple[Message, ...]:
        return (Message("dp", op, payload_bytes, "backward", ranks, apart),) if ranks > 1 else ()

    across = message("all_reduce", gradients / shard, replicate, stride * shard)
    scatter = message("reduce_scatter", gradients)
    gather = message("all_gather", weights)
    pushed = max(0.0, gradients - keys * gradient_bytes)  # the keys of all servers but oneself
    server = DataMessages(
        reduce=message("send", pushed, size), gather=message("broadcast", weights, size)
    )
    every = plan.dp.every or 1
    facts = STRATEGIES[strategy]
    if facts.shards_parameters:
        if not kept[0]:
            return DataMessages(forward=gather, backward=gather + scatter, reduce=across)
        left = weights - kept[0] * BYTES[plan.precision] if kept[1] < 1.0 else 0.0
        rest = message("all_gather", left) if left else ()
        again = tuple(replace(one, share=1.0 - kept[1]) for one in rest)
        once = message("all_gather", kept[0] * BYTES[plan.precision])
        first = tuple(replace(one, share=kept[1]) for one in once)
        return DataMessages(forward=again, backward=again + scatter, reduce=across, first=first)
    if facts.shards_gradients:
        return DataMessages(backward=scatter, reduce=across, gather=gather)
    if facts.shards_optimizer:
        return DataMessages(reduce=scatter + across, gather=gather)
    return {
        "server": server,
        "async-server": server,
        "local": DataMessages(reduce=message("all_reduce", weights / every, size)),
    }.get(strategy, DataMessages(reduce=message("all_reduce", gradients, size)))
