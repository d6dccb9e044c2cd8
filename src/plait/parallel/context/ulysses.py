"""Ulysses: between the projections and attention, sequences are exchanged for heads.

Jacobs et al., "DeepSpeed Ulysses" (2023), section 3. One all-to-all turns
[batch, heads, sequence / n, head_size] into [batch, heads / n, sequence, head_size]. Attention runs
on whole sequences as on one device, and one all-to-all turns back. Where there are fewer key-value
heads than ranks, each is sent to every rank that needs it. Sent by a rank: (n-1)/n of its q, k, v
and output, forward and backward.
"""

from __future__ import annotations

from torch import Tensor, nn

from plait.comm.functional import transition
from plait.errors import PlanError
from plait.mesh.layouts import Sharded
from plait.parallel.context.group import ContextGroup

HEADS = Sharded(1)
SEQUENCE = Sharded(2)


class UlyssesAttention(nn.Module):
    """The attention `core` of one device, on some of the heads of whole sequences."""

    def __init__(self, group: ContextGroup, core: nn.Module) -> None:
        super().__init__()
        self.group = group
        self.core = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks. Collective, differentiable.

        Args:
            q: [batch, heads, sequence / cp, head_size].
            k: [batch, kv_heads, sequence / cp, head_size], each head for a group of queries.
            v: of the shape of `k`.
            documents: [batch, sequence / cp], of packed sequences, the document of each token here.

        Returns:
            A tensor of the shape of `q`.

        Raises:
            PlanError: the heads do not divide by the ranks.
        """
        axis = self.group.axis
        size = self.group.axis.size
        check_heads(size, q.shape[1], k.shape[1])
        if k.shape[1] % size:
            k, v = (x.repeat_interleave(size // x.shape[1], dim=1) for x in (k, v))
        q, k, v = (transition(x, axis, SEQUENCE, HEADS) for x in (q, k, v))
        inputs = (q, k, v) if documents is None else (q, k, v, self.group.whole(documents))
        output: Tensor = self.core(*inputs)
        return transition(output, axis, HEADS, SEQUENCE)


def check_heads(size: int, heads: int, kv_heads: int) -> None:
    """Raise `PlanError` if `heads` or `kv_heads` do not divide by the `size` ranks."""
    if heads % size or (kv_heads % size and size % kv_heads):
        raise PlanError(
            f"cp{size}:ulysses gives each rank some of the heads; {heads} heads and "
            f"{kv_heads} key-value heads do not divide by {size}; use a size that divides "
            f"both, or cp{size}:ring"
        )
