"""Every collective of a step as data: which axis, which operation, how many bytes, how often, and when.

Traffic counts this list and time prices it, so the bytes that are predicted are the bytes whose time is predicted; the
formula of each operation is the one that the ledger counts with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.comm.transitions import bytes_sent
from plait.cost.kernels import BYTES
from plait.cost.operations import Attention, Block, Lookup, Matmul
from plait.cost.sharding import Sharding

When = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Message:
    """`count` collectives of one kind in one pass of one block; the payload as in `plait.comm.transitions.bytes_sent`."""

    axis: str
    op: str
    payload_bytes: float
    when: When
    size: int
    """The ranks that take part, `stride` apart."""
    stride: int
    count: float = 1.0

    @property
    def sent_bytes(self) -> float:
        """What one rank sends."""
        return self.count * bytes_sent(self.op, round(self.payload_bytes), self.size)


def block_messages(block: Block, shard: Sharding, precision: str) -> tuple[Message, ...]:
    """What one block sends for one micro-batch on the tensor, context and expert axes, forward and backward."""
    width = BYTES[precision]
    messages: list[Message] = []
    if shard.tp > 1:
        messages += (_line if shard.mode == "1d" else _grid)(block, shard, width)
    if shard.cp > 1:
        messages += _context(block, shard, width)
    if shard.ep > 1 and block.num_experts:
        messages += _expert(block, shard, width)
    return tuple(messages)


def _line(block: Block, shard: Sharding, width: int) -> list[Message]:
    """1D (Shoeybi et al., Megatron-LM; Korthikanti et al. for sequence parallelism): f and g around each pair of products."""
    full = shard.tokens * width
    messages: list[Message] = []

    def add(op: str, payload_bytes: float, when: When, count: float = 1.0) -> None:
        messages.append(Message("tp", op, payload_bytes, when, shard.tp, 1, count))

    for op in block.operations:
        if isinstance(op, Matmul) and op.split == "column":
            # The input is used differently by each rank, so its gradient is a partial sum.
            if shard.sequence_parallel:
                add("all_gather", full * op.inputs, "forward")
                add("all_gather", full * op.inputs, "backward")  # kept sharded, gathered again for the weight gradient
                add("reduce_scatter", full * op.inputs, "backward")
            else:
                add("all_reduce", full * op.inputs, "backward")
        elif (isinstance(op, Matmul) and op.split == "row") or isinstance(op, Lookup):
            # The output is a partial sum.
            outputs = op.outputs if isinstance(op, Matmul) else op.width
            if shard.sequence_parallel:
                add("reduce_scatter", full * outputs, "forward")
                add("all_gather", full * outputs, "backward")
            else:
                add("all_reduce", full * outputs, "forward")
        if isinstance(op, Matmul) and op.name == "head":  # maximum, sum and target of each token, in float32
            add("all_reduce", shard.tokens * 4, "forward", 3)
    return messages


def _grid(block: Block, shard: Sharding, width: int) -> list[Message]:
    """2D, 2.5D and 3D: three products for each weight (output, input gradient, weight gradient).

    2D (Xu et al., Optimus) and 2.5D (Wang et al., Tesseract) run SUMMA: q broadcasts of blocks of the input along rows and of
    the weight along columns; each backward product broadcasts one of them and reduces the other. 2.5D sums weight gradients
    over depth. 3D (Bian et al.) gathers input and weight and scatters the output, on three lines of q ranks.
    """
    q, messages = shard.q, list[Message]()

    def add(op: str, payload_bytes: float, when: When, stride: int, *, count: float = 1.0, size: int = q) -> None:
        messages.append(Message("tp", op, payload_bytes, when, size, stride, count))

    for op in block.operations:
        if not isinstance(op, Matmul) or op.split == "none":
            continue
        rows = shard.tokens * op.rows
        a, b, c = rows * op.inputs * width, float(op.inputs * op.outputs * width), rows * op.outputs * width
        if shard.mode == "3d":
            a, b, c = a / q**2, b / q**2, c / q**2
            passes: tuple[tuple[When, tuple[float, ...], tuple[float, ...]], ...]
            passes = (("forward", (a, b), (c,)), ("backward", (c, b, a), (a, b)))
            for when, gathered, scattered in passes:
                for stride, payload in zip((1, q, q * q), gathered, strict=False):
                    add("all_gather", payload, when, stride)
                for payload in scattered:
                    add("reduce_scatter", payload, when, q * q)
            continue
        a, b = a / (q * q * shard.depth), b / (q * q)
        add("broadcast", a, "forward", 1, count=q)
        add("broadcast", b, "forward", q, count=q)
        add("broadcast", b, "backward", q, count=q)
        add("reduce", a, "backward", 1, count=q)
        add("broadcast", a, "backward", 1, count=q)
        add("reduce", b, "backward", q, count=q)
        if shard.depth > 1:
            add("all_reduce", b, "backward", q * q, size=shard.depth)
    return messages


def _context(block: Block, shard: Sharding, width: int) -> list[Message]:
    """Ring attention passes keys and values around (and their gradients back); Ulysses turns tokens into heads and back."""
    messages: list[Message] = []
    for op in block.operations:
        if not isinstance(op, Attention):
            continue
        pair = shard.tokens * width * op.num_kv_heads * (op.head_dim + op.value_dim) / shard.tp
        if shard.context == "ring":
            messages.append(Message("cp", "shift", pair, "forward", shard.cp, shard.tp, shard.cp - 1))
            messages.append(Message("cp", "shift", pair, "backward", shard.cp, shard.tp, 2 * (shard.cp - 1)))
        else:
            query = shard.tokens * width * op.num_heads * (op.head_dim + op.value_dim) / shard.tp
            messages += [
                Message("cp", "all_to_all", query + pair, when, shard.cp, shard.tp) for when in ("forward", "backward")
            ]
    return messages


def _expert(block: Block, shard: Sharding, width: int) -> list[Message]:
    """Dispatch and combine: each token goes to top_k experts and returns; backward the same way round."""
    rows = shard.tokens / (shard.tp if shard.sequence_parallel else 1) * block.top_k * block.width * width
    return [Message("ep", "all_to_all", rows, when, shard.ep, shard.tp, 2) for when in ("forward", "backward")]
