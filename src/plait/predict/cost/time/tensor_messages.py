"""Messages of a tensor axis inside a block, from the table by which the engine splits modules.

Each move of `plait.mesh.tensor_layout` is the collective of its pair of layouts, and its gradient
that of the dual pair. Operands that were gathered for a product are kept in parts, and gathered
again where backward multiplies them.
"""

from __future__ import annotations

from typing import Literal, Protocol

from plait.comm.transitions import backward, operation
from plait.mesh.tensor_layout import Axes, LinearLayout, Move, TensorLayout
from plait.predict.cost.model.operations import Block, Elementwise, Lookup, Matmul, Operation
from plait.predict.cost.sharding import Sharding

When = Literal["forward", "backward"]

TOKEN_BYTES = 8
LOSS_NUMBERS = 3
"""Largest logit, sum of exponentials and the target's logit of each token, gathered from all parts
of the vocabulary.
"""


class Add(Protocol):
    """Takes one collective of a block."""

    def __call__(
        self,
        op: str,
        payload_bytes: float,
        when: When,
        *,
        stride: int = 1,
        size: int = 1,
        last: bool = False,
    ) -> None: ...


class _Moves:
    """The messages of the operations of one block; `whole` bytes a number, `width` of an
    activation that travels.
    """

    def __init__(self, shard: Sharding, width: int, add: Add) -> None:
        self.shard = shard
        self.layout: TensorLayout = shard.layout
        self.whole = width
        self.width = shard.message_width(width)
        self._add = add

    def add(self, op: str, payload: float, when: When, axes: Axes, *, last: bool = False) -> None:
        """One collective over the ranks along some axes."""
        size, stride = self.layout.line(axes)
        self._add(op, payload, when, size=size, stride=stride, last=last)

    def forward(self, move: Move, payload: float, *, last: bool = False) -> None:
        """The move of an operand of `payload` bytes when it is not in parts."""
        op = operation(move.source, move.target)
        if op != "none":
            self.add(op, payload, "forward", (move.axis,), last=last)

    def again(self, move: Move, payload: float) -> None:
        """The move once more, for a product of backward."""
        self.add(operation(move.source, move.target), payload, "backward", (move.axis,))

    def gradient(self, move: Move, payload: float) -> None:
        """The move of the operand's gradient."""
        op = operation(*backward(move.source, move.target))
        if op != "none":
            self.add(op, payload, "backward", (move.axis,))

    def bytes_of(self, move: Move, numbers: float, cuts: Axes) -> float:
        """Bytes of an operand, when the move has joined its parts.

        `numbers` are those of the whole operand, and `cuts` all axes that cut it.
        """
        return numbers * self.width / self.layout.size(cuts, without=move.axis)

    def product(self, op: Matmul, linear: LinearLayout, *, last: bool) -> None:
        """The operands of one product, forward and backward."""
        rows = self.shard.tokens * op.rows
        x, weight, y = linear.x, linear.weight, linear.y
        is_grid = weight is not None
        if weight is not None:
            payload = self.bytes_of(weight, op.inputs * op.outputs, linear.out + linear.into)
            self.forward(weight, payload)
            self.gradient(weight, payload)
            if not op.raw:
                self.again(weight, payload)
        if x is not None:
            payload = self.bytes_of(x, rows * op.inputs, linear.source.every)
            self.forward(x, payload)
            gathers = operation(x.source, x.target) == "all_gather"
            if gathers and (is_grid or self.shard.regather):
                self.again(x, payload)
            if not op.raw:
                self.gradient(x, payload)
        if y is not None:
            payload = self.bytes_of(y, rows * op.outputs, linear.target.every)
            self.forward(y, payload, last=last)
            self.gradient(y, payload)

    def lookup(self, op: Lookup, *, last: bool) -> None:
        """The rows of a table in parts of its vocabulary."""
        layout = self.layout
        table = layout.embedding
        stream = layout.residual
        if table.tokens is not None:
            parts = layout.size(stream.different, without=table.tokens)
            self.add(
                "all_gather", self.shard.tokens / parts * TOKEN_BYTES, "forward", (table.tokens,)
            )
        if table.rows is not None:
            parts = layout.size(table.vocabulary + table.features, without=table.rows)
            payload = op.rows * op.width / parts * self.width
            self.add("all_gather", payload, "forward", (table.rows,))
            self.add("reduce_scatter", payload, "backward", (table.rows,))
        payload = self.bytes_of(table.total, self.shard.tokens * op.width, stream.every)
        self.forward(table.total, payload, last=last)
        self.gradient(table.total, payload)

    def replicated(self, op: Matmul) -> None:
        """Features that are cut between layers are gathered, and every rank multiplies them."""
        stream = self.layout.residual
        if stream.features:
            tokens = self.shard.tokens / self.layout.size(stream.different)
            payload = tokens * op.rows * op.inputs * self.width
            self.add("all_gather", payload, "forward", stream.features)

    def statistics(self, op: Elementwise) -> None:
        """Sums over features that are cut: of a layer norm all ranks' means and squares."""
        stream = self.layout.residual
        if not stream.features:
            return
        size = self.layout.size(stream.features)
        tokens = self.shard.tokens / self.layout.size(stream.different)
        payload = op.statistics * tokens * max(4, self.whole)
        if op.statistics > 1:
            self.add("all_gather", payload * size, "forward", stream.features)
        else:
            self.add("all_reduce", payload, "forward", stream.features)
        self.add("all_reduce", payload, "backward", stream.features)

    def loss(self) -> None:
        """Numbers of the cross-entropy of logits in parts of the vocabulary."""
        stream = self.layout.inner
        tokens = self.shard.tokens / self.layout.size(stream.different)
        size = self.layout.size(stream.features)
        payload = size * LOSS_NUMBERS * tokens * max(4, self.whole)
        self.add("all_gather", payload, "forward", stream.features)


def tensor_messages(block: Block, shard: Sharding, width: int, add: Add) -> None:
    """Every collective of a block on the tensor axis.

    Under 1D product and sum may be two steps. Recomputation then does not need the sum of the last
    row of a block again (`last`).
    """
    moves = _Moves(shard, width, add)
    inside: list[Operation] = [op for op in block.operations if op.name != "residual"]
    separate = shard.mode == "1d" and not shard.fused_rows
    for op in block.operations:
        if isinstance(op, Matmul) and op.copies > 1 and shard.folded:
            continue  # whole experts: their tokens come and go on the expert axis alone
        last = separate and op is inside[-1]
        if isinstance(op, Matmul) and op.split in {"column", "row"}:
            role = "head" if op.name == "head" and op.split == "column" else op.split
            # The sum of experts is weighed by the router, which keeps it.
            moves.product(op, moves.layout.linear[role], last=last and op.copies == 1)
        elif isinstance(op, Matmul):
            moves.replicated(op)
        elif isinstance(op, Elementwise) and op.statistics:
            moves.statistics(op)
        elif isinstance(op, Lookup) and op.split == "column":
            moves.lookup(op, last=last)
        if isinstance(op, Matmul) and op.name == "head" and op.split == "column":
            moves.loss()
