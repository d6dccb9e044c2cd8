"""Ring attention: queries stay, keys and values travel round the ring, and each rank adds up what it meets.

Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023), section 3; zig-zag order: see `group`. In step s
rank r meets the keys and values of rank j = r - s, while those of the next step are under way, or where they lie if it can
read the memory of rank j:

    j = r    causal, as on one device: the own two chunks are in order
    j < r    all queries see the first chunk of j, and nothing of its second
    j > r    the second half of the queries sees everything of j, the first half nothing

so every step but the first is half of a square. Backward walks the ring again; the gradients of keys and values travel with
them and end at home. Sent by a rank, in units of its keys and values: n-1 forward, 2 (n-1) backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Axis, Work
from plait.context.block import attend, attend_backward, merge
from plait.context.group import ContextGroup


class RingAttention(nn.Module):
    """Causal attention over sequences cut in zig-zag order: [B, H, S here, K] x 3 -> the same; G <= H key-value heads."""

    def __init__(self, group: ContextGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """`k` and `v` may have fewer heads than `q`, each serving a group of queries; only they travel.

        `documents` [B, S here]: of packed sequences, the document of each token that is here.
        """
        return ring_attention(q, k, v, self.group, None if documents is None else self.group.whole(documents))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: ContextGroup, documents: Tensor | None = None) -> Tensor:
    """Attention round the ring; differentiable.

    `documents` [B, S], of the whole sequence on every rank: a token sees only tokens of its own document (packed sequences).
    """
    output: Tensor = _Ring.apply(q, k, v, group, documents)
    return output


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # as autograd calls it
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ContextGroup, documents: Tensor | None
    ) -> Tensor:
        visits = _Visits(group, q.shape[1] // k.shape[1], documents)
        wide = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        for step, keys_values in enumerate(group.axis.tour(torch.stack((k, v)))):
            visit = visits.of(step)
            part, part_lse = attend(visit.queries(q), *visit.keys_values(keys_values), causal=visit.causal, mask=visit.mask)
            here = visit.rows
            out[:, :, here], lse[:, :, here] = merge(out[:, :, here], lse[:, :, here], part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.visits, ctx.axis = visits, group.axis
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        axis, grad = ctx.axis, grads[0]
        dq, own = torch.zeros_like(q), k.new_zeros((2, *k.shape))
        guest = _Guest(axis, own)
        for step, keys_values in enumerate(axis.tour(torch.stack((k, v)))):
            visit = ctx.visits.of(step)
            here = visit.rows
            parts = attend_backward(
                visit.queries(grad),
                (visit.queries(q), *visit.keys_values(keys_values)),
                visit.queries(out),
                lse[:, :, here].contiguous(),
                causal=visit.causal,
                mask=visit.mask,
            )
            dq[:, :, here] += parts[0]
            visit.add(own if step == 0 else guest.receive(), parts[1:])
            if step:
                guest.send()
        guest.come_home()
        return dq, own[0], own[1], None, None


class _Guest:
    """The gradients of keys and values that travel with them: of rank - step, and after the last step back at home.

    In two buffers as well: one is added to while the other is under way.
    """

    def __init__(self, axis: Axis, own: Tensor) -> None:
        self._axis, self._own = axis, own
        self._here, self._other = torch.zeros_like(own), torch.empty_like(own)
        self._work: Work | None = None

    def receive(self) -> Tensor:
        """What the ranks before have added up for the keys and values that are here now; zeros at the first."""
        if self._work is not None:
            self._work.wait()
            self._here, self._other = self._other, self._here
        return self._here

    def send(self) -> None:
        """On to the next rank."""
        self._work = self._axis.shift(self._other, self._here)

    def come_home(self) -> None:
        """Add what the others made of the own keys and values."""
        if self._work is not None:
            self._own += self.receive()


class _Visit:
    """What the queries of this rank see of one rank's keys and values."""

    def __init__(self, rows: slice, cols: slice, causal: bool, repeats: int, mask: Tensor | None) -> None:
        self.rows, self.cols, self.causal, self.repeats, self.mask = rows, cols, causal, repeats, mask

    def queries(self, x: Tensor) -> Tensor:
        return x[:, :, self.rows]

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that are seen, one head for each query head."""
        seen = x[:, :, :, self.cols]
        seen = seen.repeat_interleave(self.repeats, dim=2) if self.repeats > 1 else seen
        return seen[0], seen[1]

    def add(self, total: Tensor, parts: tuple[Tensor, ...]) -> None:
        """Add gradients of keys and values to `total` [2, B, G, S here, K]."""
        for place, part in zip(total, parts, strict=True):
            place[:, :, self.cols] += part.unflatten(1, (-1, self.repeats)).sum(2) if self.repeats > 1 else part


class _Visits:
    """The visit of each step."""

    def __init__(self, group: ContextGroup, repeats: int, documents: Tensor | None) -> None:
        self._group, self._repeats, self._documents = group, repeats, documents
        self._length = group.seq_len // group.axis.size

    def of(self, step: int) -> _Visit:
        rank, size, half = self._group.axis.rank, self._group.axis.size, self._length // 2
        other = (rank - step) % size
        rows = slice(half, None) if other > rank else slice(None)
        cols = slice(None, half) if other < rank else slice(None)
        if self._documents is None:
            return _Visit(rows, cols, other == rank, self._repeats, None)
        mine, theirs = self._group.positions()[rows], self._group.positions(other)[cols]
        same = self._documents[:, mine][:, :, None] == self._documents[:, theirs][:, None, :]
        seen = same & (mine[:, None] >= theirs[None, :]).to(same.device)
        return _Visit(rows, cols, False, self._repeats, seen[:, None])
