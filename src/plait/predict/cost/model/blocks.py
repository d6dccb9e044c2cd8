"""A description as a table, a row for each kind of block: a person's first question about a model.

The numbers are those that time, memory and traffic use. They are for one sample on one device, with
the messages of one tensor axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.plan import Plan
from plait.plan.axes import REMATS
from plait.predict.cost.memory.rank_memory import block_activations
from plait.predict.cost.model.operations import Attention, Block, Matmul, Model
from plait.predict.cost.sharding import sharding
from plait.predict.cost.time.messages import block_messages

MODES = {
    "1d": "tp4:1d",
    "1d,sp": "tp4:1d,sp",
    "2d": "tp4:2d",
    "2.5d": "tp8:2.5d,depth2",
    "3d": "tp8:3d",
}
"""A smallest plan of each tensor mode."""
FUSED_BACKWARD = 2.5
"""Products of a fused attention's backward over its forward's two: the scores are computed
again.
"""


@dataclass(frozen=True)
class BlockRow:
    """One kind of block: `count` of them; flops and bytes of one sample. `messages` by tensor mode:
    (operation, payload bytes, how many) of forward and backward.
    """

    name: str
    count: int
    parameters: int
    forward_flops: float
    backward_flops: float
    activation_bytes: dict[str, float]
    messages: dict[str, tuple[tuple[str, float, float], ...]]


def block_table(model: Model, precision: str = "bf16") -> list[BlockRow]:
    """A row for each run of equal blocks; flops of a causal attention are of the half that it
    computes.
    """
    return [_row(block, count, model.seq_len, precision) for block, count in model.runs]


def _row(block: Block, count: int, seq_len: int, precision: str) -> BlockRow:
    alone = sharding(Plan.parse("dp1"), seq_len, 1.0)
    forward, backward = flops(block, seq_len)
    return BlockRow(
        block.name,
        count,
        block.parameters,
        forward,
        backward,
        {remat: block_activations(block, alone, (precision, False, remat)) for remat in REMATS},
        {mode: _messages(block, text, seq_len, precision) for mode, text in MODES.items()},
    )


def flops(block: Block, seq_len: int) -> tuple[float, float]:
    """Forward and backward of one sample. A product has two of its size in backward, or one where
    its input is data.
    """
    forward = backward = 0.0
    for op in block.operations:
        if isinstance(op, Matmul):
            forward += op.flops()
            backward += op.flops() * (1.0 if op.raw else 2.0)
        elif isinstance(op, Attention):
            one = op.flops(seq_len) * (0.5 if op.causal else 1.0)
            forward += one
            backward += one * (FUSED_BACKWARD if op.fused else 2.0)
    return forward * seq_len, backward * seq_len


def _messages(
    block: Block, text: str, seq_len: int, precision: str
) -> tuple[tuple[str, float, float], ...]:
    plan: Any = Plan.parse(text)
    parts = sharding(
        plan, seq_len, 1.0
    ).sample_parts  # a grid deals out samples: as many as it has parts
    shard = sharding(plan, seq_len, float(parts))
    return tuple(
        (one.op, one.payload_bytes, one.count) for one in block_messages(block, shard, precision)
    )
