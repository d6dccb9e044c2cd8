"""Ring attention: queries stay, keys and values travel round the ring, and partial results add up.

Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023), section 3. The zig-zag
order is that of `group`, the steps are those of `ring_schedule`. While a rank attends, the keys and
values of the next step are sent. A rank that can read its peers' memory reads them there. Every
step but the first is half of a square.

Backward goes round the ring again. In the paper the gradients of keys and values travel with them.
Here the gradients of a step return to their owners at once. The bytes are equal, and no rank waits
for the sum of the rank before. Sent by a rank, in units of its keys and values: n-1 forward, 2
(n-1) backward.
"""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor, nn

from plait.comm import Axis, Work
from plait.comm.functional import compute_and_shift
from plait.parallel.context.block import attend, attend_backward, merge
from plait.parallel.context.group import ContextGroup
from plait.parallel.context.ring_schedule import (
    AttentionBlock,
    RingSchedule,
    RingStep,
    Visibility,
)
from plait.values import AutogradContext


class RingAttention(nn.Module):
    """Causal attention over sequences cut in zig-zag order, in place of a model's own."""

    def __init__(self, group: ContextGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks. Collective, differentiable.

        Args:
            q: [batch, heads, sequence / cp, head_size].
            k: [batch, kv_heads, sequence / cp, head_size], each head for a group of queries.
            v: of the shape of `k`; k and v alone travel.
            documents: [batch, sequence / cp], of packed sequences, the document of each token here.

        Returns:
            A tensor of the shape of `q`.
        """
        whole = None if documents is None else self.group.whole(documents)
        return ring_attention(q, k, v, self.group, whole)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ContextGroup, documents: Tensor | None = None
) -> Tensor:
    """Causal attention round the ring. Collective, forward and backward; differentiable.

    Args:
        q: [batch, heads, sequence / cp, head_size].
        k: [batch, kv_heads, sequence / cp, head_size]; the heads of `q` are a multiple.
        v: of the shape of `k`.
        group: the ranks, and the positions of each.
        documents: [batch, sequence], whole on every rank: a token sees only tokens of its own
            document (packed sequences).

    Returns:
        A tensor of the shape of `q`.
    """
    return masked_ring_attention(q, k, v, group, Visibility(documents=documents))


def masked_ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ContextGroup, visibility: Visibility
) -> Tensor:
    """Attention of any mask round the ring. Collective; differentiable in q, k and v.

    Shapes are those of `ring_attention`: q [batch, heads, sequence / cp, head_size], k and v with
    `kv_heads`. The result has the shape of `q`.
    """
    output: Tensor = _Ring.apply(q, k, v, group, visibility)
    return output


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # as autograd calls it  # noqa: PLR0917
        ctx: AutogradContext,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: ContextGroup,
        visibility: Visibility,
    ) -> Tensor:
        schedule = RingSchedule(group, q.shape[1] // k.shape[1], visibility)
        wide = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
        with closing(group.axis.rotate(k, v)) as arriving:
            local = schedule.local()
            out, lse = attend(
                q, *local.by_head(local.collect(arriving)), causal=local.causal, mask=local.mask
            )
            out = out.to(wide)
            for step in schedule.steps():
                for block, pair in step.attend_to(arriving):
                    part, part_lse = attend(
                        block.queries(q), *block.by_head(pair), causal=False, mask=block.mask
                    )
                    merge(block.queries(out), block.queries(lse), part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.schedule = schedule
        ctx.axis = group.axis
        return out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        schedule = ctx.schedule
        axis = ctx.axis
        saved = (grads[0], q, out, lse)
        with closing(axis.rotate(k, v)) as arriving:
            local = schedule.local()
            dq, dk, dv = _gradients(local, saved, local.collect(arriving))
            total = torch.stack([local.by_rank(grad)[0] for grad in (dk, dv)])
            del dk, dv
            returned = _GradientReturn(axis, total)
            for step in schedule.steps():
                # No name is given to these gradients: it would keep them through the next step.
                returned.send(
                    step,
                    [
                        _add(dq, block, _gradients(block, saved, pair))
                        for block, pair in step.attend_to(arriving)
                    ],
                )
            returned.wait()
        return dq, total[0], total[1], None, None


def _gradients(
    block: AttentionBlock, saved: tuple[Tensor, ...], pair: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's part of the gradients of q, k and v.

    `saved`: the gradient of out, q, out and lse of this rank.
    """
    grad, q, out, lse = (block.queries(x) for x in saved)
    qkv = (q, *block.by_head(pair))
    return attend_backward(grad, qkv, out, lse.contiguous(), causal=block.causal, mask=block.mask)


def _add(
    dq: Tensor, block: AttentionBlock, grads: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Add a block's part to the gradient of the queries -> the gradients of its keys and values."""
    block.queries(dq).add_(grads[0])
    return grads[1:]


class _GradientReturn:
    """Gradients of other ranks' keys and values, sent to their owners during the next step.

    Gradients that arrive are added to `total`, the gradients of this rank's keys and values.
    """

    def __init__(self, axis: Axis, total: Tensor) -> None:
        self._axis = axis
        self._total = total
        self._work: Work | None = None

    def send(self, step: RingStep, grads: list[tuple[Tensor, Tensor]]) -> None:
        """Send the gradients of keys and values of each block of a step.

        The gradients of the step before have arrived then.
        """
        self.wait()
        self._work = compute_and_shift(
            self._axis,
            self._total,
            [-shift for shift in step.shifts],
            lambda parts: step.gather(parts, grads),
        )

    def wait(self) -> None:
        """Wait until the gradients that others sent are added."""
        if self._work is not None:
            self._work.wait()
