"""Every collective of a step as data: which axis, which operation, how many bytes, how often, and
when.

Traffic counts this list and time prices it, so predicted time belongs to the predicted bytes. The
formula of each operation is the ledger's.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.comm.transitions import bytes_sent
from plait.predict.cost.model.operations import Attention, Block
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.tensor_messages import When, tensor_messages
from plait.predict.cost.widths import BYTES


@dataclass(frozen=True, slots=True)
class Message:
    """`count` collectives of one kind in one pass of one block; the payload as in
    `plait.comm.transitions.bytes_sent`.
    """

    axis: str
    op: str
    payload_bytes: float
    when: When
    size: int
    """The ranks that take part, `stride` apart."""
    stride: int
    count: float = 1.0
    repeats: bool = True
    """A forward that is computed again sends it again. The sum at the very end of a block is not
    needed twice.
    """
    share: float = 1.0
    """On the data axis: the part of the blocks that it is of."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends."""
        return self.count * bytes_sent(self.op, round(self.payload_bytes), self.size)


def block_messages(block: Block, shard: Sharding, precision: str) -> tuple[Message, ...]:
    """Messages of one block for one micro-batch on the tensor, context and expert axes, forward and
    backward.
    """
    width = BYTES[precision]
    messages: list[Message] = []

    def add(
        op: str,
        payload_bytes: float,
        when: When,
        *,
        stride: int = 1,
        size: int = 1,
        last: bool = False,
    ) -> None:
        messages.append(Message("tp", op, payload_bytes, when, size, stride, repeats=not last))

    if shard.tp > 1:
        tensor_messages(block, shard, width, add)
    if shard.cp > 1:
        messages += _context(block, shard, width)
    if shard.ep > 1 and block.num_experts:
        messages += _expert(block, shard, width)
    return tuple(messages)


def _context(block: Block, shard: Sharding, width: int) -> list[Message]:
    """Ring attention passes keys and values around (and their gradients back); Ulysses turns tokens
    into heads and back.
    """
    messages: list[Message] = []
    for op in block.operations:
        if not isinstance(op, Attention):
            continue
        pair = shard.tokens * width * op.num_kv_heads * (op.head_dim + op.value_dim) / shard.tp
        if shard.context == "ring":
            messages.append(
                Message("cp", "shift", pair, "forward", shard.cp, shard.tp, shard.cp - 1)
            )
            messages.append(
                Message("cp", "shift", pair, "backward", shard.cp, shard.tp, 2 * (shard.cp - 1))
            )
        else:
            query = shard.tokens * width * op.num_heads * (op.head_dim + op.value_dim) / shard.tp
            messages += [
                Message("cp", "all_to_all", query + pair, when, shard.cp, shard.tp)
                for when in ("forward", "backward")
            ]
    return messages


def _expert(block: Block, shard: Sharding, width: int) -> list[Message]:
    """Dispatch and combine: each token goes to top_k experts and returns; backward the same way
    round.
    """
    rows = (
        shard.tokens
        / (shard.tp if shard.sequence_parallel else 1)
        * block.top_k
        * block.width
        * width
    )
    rows *= shard.imbalance * shard.expert_traffic
    apart = 1 if shard.folded else shard.tp
    return [
        Message("ep", "all_to_all", rows, when, shard.ep, apart, 2)
        for when in ("forward", "backward")
    ]
