"""Ring attention: queries stay, keys and values travel round the ring, and each rank adds up what
it meets.

Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023), section 3; zig-zag order:
see `group`. What a rank meets, and how much of it at once: see `rounds`. While it attends, the keys
and values of the next step are under way, or lie where they are, if it can read the memory of their
rank. Every step but the first is half of a square.

Backward walks the ring again. The paper has the gradients of keys and values travel with them; here
those of a round go home at once, which sends as much, but nobody waits for what the rank before has
added. Sent by a rank, in units of its keys and values: n-1 forward, 2 (n-1) backward.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Axis, Work
from plait.comm.fused import compute_and_shift
from plait.parallel.context.block import attend, attend_backward, merge
from plait.parallel.context.group import ContextGroup
from plait.parallel.context.rounds import Round, Visit, Way


class RingAttention(nn.Module):
    """Causal attention over sequences cut in zig-zag order: [B, H, S here, K] x 3 -> the same; G <=
    H key-value heads.
    """

    def __init__(self, group: ContextGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """`k` and `v` may have fewer heads than `q`, each serving a group of queries; only they
        travel.

        `documents` [B, S here]: of packed sequences, the document of each token that is here.
        """
        return ring_attention(
            q, k, v, self.group, None if documents is None else self.group.whole(documents)
        )


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ContextGroup, documents: Tensor | None = None
) -> Tensor:
    """Attention round the ring; differentiable.

    `documents` [B, S], of the whole sequence on every rank: a token sees only tokens of its own
    document (packed sequences).
    """
    output: Tensor = _Ring.apply(q, k, v, group, documents)
    return output


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # as autograd calls it  # noqa: PLR0917
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ContextGroup, documents: Tensor | None
    ) -> Tensor:
        way = Way(group, q.shape[1] // k.shape[1], documents)
        wide = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
        with closing(group.axis.rotate(k, v)) as shown:
            own = way.own()
            out, lse = attend(q, *own.by_head(own.collect(shown)), causal=own.causal, mask=own.mask)
            out = out.to(wide)
            for stretch in way.rounds():
                for visit, pair in stretch.meet(shown):
                    part, part_lse = attend(
                        visit.queries(q), *visit.by_head(pair), causal=False, mask=visit.mask
                    )
                    merge(visit.queries(out), visit.queries(lse), part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.way = way
        ctx.axis = group.axis
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        way = ctx.way
        axis = ctx.axis
        saved = (grads[0], q, out, lse)
        with closing(axis.rotate(k, v)) as shown:
            own = way.own()
            dq, dk, dv = _gradients(own, saved, own.collect(shown))
            total = torch.stack([own.by_rank(grad)[0] for grad in (dk, dv)])
            del dk, dv
            home = _Homeward(axis, total)
            for stretch in way.rounds():
                home.send(
                    stretch,
                    [
                        _add(dq, visit, _gradients(visit, saved, pair))
                        for visit, pair in stretch.meet(shown)
                    ],
                )
            home.wait()
        return dq, total[0], total[1], None, None


def _gradients(
    visit: Visit, saved: tuple[Tensor, ...], pair: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A visit's part of the gradients of q, k and v; `saved` are the gradient of out, q, out and
    lse of this rank.
    """
    grad, q, out, lse = (visit.queries(x) for x in saved)
    qkv = (q, *visit.by_head(pair))
    return attend_backward(grad, qkv, out, lse.contiguous(), causal=visit.causal, mask=visit.mask)


def _add(dq: Tensor, visit: Visit, grads: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Add a visit's part to the gradient of the queries; those of its keys and values are left."""
    visit.queries(dq).add_(grads[0])
    return grads[1:]


class _Homeward:
    """Gradients of others' keys and values on their way to their owners, those of one round while
    the next is met.

    What comes from the others is added to `total`, the gradients of the own keys and values.
    """

    def __init__(self, axis: Axis, total: Tensor) -> None:
        self._axis = axis
        self._total = total
        self._work: Work | None = None

    def send(self, stretch: Round, grads: list[tuple[Tensor, Tensor]]) -> None:
        """The gradients of keys and values of each visit of a round. Those of the round before have
        arrived then.
        """
        self.wait()
        self._work = compute_and_shift(
            self._axis,
            self._total,
            [-step for step in stretch.steps],
            lambda parts: stretch.gather(parts, grads),
        )

    def wait(self) -> None:
        """Until what the others sent is added."""
        if self._work is not None:
            self._work.wait()
