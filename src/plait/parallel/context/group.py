"""Which positions of a sequence a rank of the context axis holds.

For ring attention the sequence is cut into 2 n chunks, and rank r of n holds chunks r and 2n-1-r
(A. Dubey et al., The Llama 3 Herd of Models, 2024, section 3.3.2). The order is known as "zig-zag"
from Z. Zhu's ring-flash-attention (2024). An early token attends to few others and a late one to
many. So each rank has equal work in every step of the ring.

    n = 2, 8 positions      rank 0: 0 1 . . . . 6 7      rank 1: . . 2 3 4 5 . .

For Ulysses the parts are contiguous: every rank sees whole sequences where it matters.

The patches of a picture and their class token seldom divide. Behind the last position stand
copies of it then. Attention hides them, and what gathers leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from plait.comm import Axis
from plait.comm.functional import transition
from plait.errors import DataError
from plait.mesh.layouts import REPLICATED, Sharded
from plait.values import PyTree


def _nothing() -> None:
    pass


class ContextGroup:
    """The context axis of cp ranks, and the length of the current sequences.

    `cut` reads the length off a batch. With `whole_inputs` the model's inputs stay whole: it takes
    this rank's positions by itself. `inside` says that sequences begin inside the model, and how
    long they are. It gathers them again then: `whole_outputs`. The length is that at its blocks.
    With `one_length` every sequence has that length. Later stages of a pipeline see parts only.
    """

    learns = False  # from what it meets: see `rehearsal`

    def __init__(
        self,
        axis: Axis,
        strategy: str,
        *,
        whole_inputs: bool = False,
        inside: int = 0,
        one_length: bool = False,
    ) -> None:
        self.axis = axis
        self.strategy = strategy
        self.whole_inputs = whole_inputs
        self.whole_outputs = inside > 0
        self._one_length = one_length
        self._after_layers: Callable[[], None] = _nothing
        self.seq_len = inside
        self._gathered: tuple[Tensor, Tensor] | None = None

    def cut_head_by(self, cut: Callable[[], None]) -> None:
        """Have `cut` called once the layers of the model are split."""
        self._after_layers = cut

    def take_length(self, whole: Tensor, dim: int = 1) -> None:
        """Take the length of the sequences from dim `dim` of a tensor of whole ones.

        By default it is [batch, sequence, ...]. Raises `DataError` for another than the one length.
        """
        length = whole.shape[dim]
        if self._one_length and length != self.seq_len:
            raise DataError(
                f"a batch has {length} positions at the door of the blocks, and the example "
                f"{self.seq_len}; later stages of a pipeline know of the example's alone under "
                f"cp{self.axis.size}: give all pictures one size, or leave pp out"
            )
        self.seq_len = length

    def after_layers(self) -> None:
        """The layers of the model are split."""
        self._after_layers()

    @property
    def num_chunks(self) -> int:
        """Into how many equal chunks a sequence is cut."""
        return self.axis.size * (2 if self.strategy == "ring" else 1)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order in which it holds them."""
        return (rank, 2 * self.axis.size - 1 - rank) if self.strategy == "ring" else (rank,)

    def positions(self, rank: int | None = None) -> Tensor:
        """The positions [sequence / cp] in the whole sequence of a rank's tokens; this rank's by
        default. Those of filling are `seq_len` and more.
        """
        length = -(-self.seq_len // self.num_chunks)
        rank = self.axis.rank if rank is None else rank
        return torch.cat(
            [torch.arange(chunk * length, (chunk + 1) * length) for chunk in self.chunks(rank)]
        )

    def order(self) -> Tensor:
        """The index [sequence] of each position in the concatenated parts of all ranks."""
        parts = torch.cat([self.positions(rank) for rank in range(self.axis.size)])
        return parts.argsort()[: self.seq_len]

    def whole(self, part: Tensor) -> Tensor:
        """[batch, sequence / cp] of every rank -> [batch, sequence] in the order of positions.

        Collective, once for a tensor: one gathering serves all layers. Not differentiable.
        """
        if self._gathered is None or self._gathered[0] is not part:
            mine = part.t().contiguous()
            parts = mine.new_empty((self.axis.size * mine.shape[0], mine.shape[1]))
            self.axis.all_gather(parts.view(-1), mine.view(-1)).wait()
            whole = parts[self.order().to(part.device)].t().contiguous()
            self._gathered = (part, whole)
        return self._gathered[1]

    @property
    def length(self) -> int:
        """The positions of a sequence that a rank holds, with those of filling."""
        return -(-self.seq_len // self.num_chunks) * self.num_chunks // self.axis.size

    @property
    def filling(self) -> int:
        """How many positions all ranks hold beyond the last of the sequence."""
        return self.length * self.axis.size - self.seq_len

    def is_part(self, x: Tensor, dim: int) -> bool:
        """Whether dimension `dim` of `x`, of any shape, is as long as sequence / cp."""
        return x.dim() >= max(-dim, dim + 1) and x.shape[dim] == self.length

    def is_whole(self, x: Tensor, dim: int) -> bool:
        """Whether dimension `dim` of `x`, of any shape, is as long as the whole sequence."""
        return x.dim() >= max(-dim, dim + 1) and x.shape[dim] == self.seq_len

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's positions of what every rank has. No communication; differentiable.

        `whole` has any shape, with the sequence as dimension `dim`; the result has sequence / cp.
        The gradient of `whole` is a partial sum.
        """
        positions = self.positions().clamp(max=self.seq_len - 1)
        return whole.index_select(dim, positions.to(whole.device))

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """All positions in their order, from every rank's part. Collective and differentiable.

        `part` has any shape, with sequence / cp as dimension `dim`; the result has the sequence.
        """
        dim %= part.dim()
        wire = part.to(torch.uint8) if part.dtype == torch.bool else part
        whole = transition(wire, self.axis, Sharded(dim), REPLICATED).to(part.dtype)
        return whole.index_select(dim, self.order().to(whole.device))

    def cut(self, batch: PyTree) -> PyTree:
        """This rank's positions of every tensor of a batch that has a sequence (dimension 1).

        Args:
            batch: (inputs, targets); tensors [batch, sequence, ...] become [batch, sequence / cp,
                ...], those of one dim stay. With `whole_inputs` targets alone are cut, with
                `whole_outputs` nothing.

        Raises:
            DataError: tensors that disagree on the length, or a length that does not divide.
        """
        if self.whole_outputs:
            return batch
        if self.whole_inputs:
            inputs, targets = batch
            return inputs, self._cut(targets)
        return self._cut(batch)

    def _cut(self, batch: PyTree) -> PyTree:
        lengths: set[int] = set()
        tree_map_only(
            Tensor, lambda leaf: lengths.add(leaf.shape[1]) if leaf.dim() > 1 else None, batch
        )
        if len(lengths) != 1:
            found = f"they have lengths {sorted(lengths)}" if lengths else "none has two dims"
            raise DataError(
                f"cp{self.axis.size} cuts sequences, the second dim of all tensors, and {found}; "
                "give tensors (samples, sequence, ...), or leave cp out"
            )
        length = lengths.pop()
        if length % self.num_chunks:
            below = length - length % self.num_chunks
            near = f"{below} or {below + self.num_chunks}" if below else f"{self.num_chunks}"
            raise DataError(
                f"cp{self.axis.size}:{self.strategy} cuts sequences into {self.num_chunks} chunks, "
                f"and {length} tokens do not divide; the nearest seq_len is {near}"
            )
        self.seq_len = length
        positions = self.positions()

        def part(leaf: Tensor) -> Tensor:
            return leaf.index_select(1, positions.to(leaf.device)) if leaf.dim() > 1 else leaf

        return tree_map_only(Tensor, part, batch)
