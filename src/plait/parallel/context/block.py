"""Attention of some queries to some keys, with the log of the softmax's denominator (lse).

For a query whose keys lie in several blocks, out = sum_j exp(lse_j - lse) out_j with lse = log
sum_j exp(lse_j): the rule of the online softmax (Dao et al., "FlashAttention", 2022, section 3.1).
The backward of a block needs the *final* out and lse alone. No function here communicates or is
differentiable.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.torch_internals import flash, flash_backward, flash_cpu, flash_cpu_backward


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys, and the log of its denominator.

    Args:
        q: [batch, heads, queries, head_size].
        k: [batch, heads, keys, head_size], one head for each of `q`.
        v: of the shape of `k`.
        causal: query i sees keys 0..i of as many.
        mask: [batch or 1, heads or 1, queries or 1, keys]. True where a query sees a key, or
            numbers that are added to the scores.

    Returns:
        out [batch, heads, queries, head_size] and lse [batch, heads, queries], which the caller may
        write into. A query that sees nothing has out 0 and lse -inf.
    """
    q, k, v = (_rows(x) for x in (q, k, v))
    if mask is None and q.device.type == "cpu":
        out, lse = flash_cpu(q, k, v, 0.0, causal)
        return out, lse
    if mask is None and _takes_flash(q):
        results = flash(q, k, v, 0.0, causal)
        return results[0], results[1]
    scores = _scores(q, k, causal, mask)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    # Selective recomputation keeps the product itself, so the caller writes into a copy of it.
    out = (weights.to(v.dtype) @ v).clone()
    return out, lse


def attend_backward(
    grad: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v.

    Args:
        grad: of `out`, [batch, heads, queries, head_size].
        qkv: q, k and v, as `attend` takes them.
        out: [batch, heads, queries, head_size], over all blocks.
        lse: [batch, heads, queries], contiguous, over all blocks.
        causal: as `attend` takes it.
        mask: as `attend` takes it.

    Returns:
        Three tensors of the shapes of q, k and v.
    """
    q, k, v, grad, out = (_rows(x) for x in (*qkv, grad, out))
    if mask is None and q.device.type == "cpu":
        dq, dk, dv = flash_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
        return dq, dk, dv
    if mask is None and _takes_flash(q):
        empty = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = flash_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, empty, empty
        )
        return dq, dk, dv
    scores = _scores(q, k, causal, mask)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    delta = (grad.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
    inner = (
        weights * ((grad @ v.transpose(-1, -2)).to(weights.dtype) - delta) / math.sqrt(q.shape[-1])
    )
    inner = inner.to(q.dtype)
    return inner @ k, inner.transpose(-1, -2) @ q, weights.to(q.dtype).transpose(-1, -2) @ grad


def _rows(x: Tensor) -> Tensor:
    """The tensor with the elements of a head side by side.

    The kernels take that for granted, and read other memory where it is not so.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a part to (out, lse), in place: exp(part_lse - total) is a sigmoid.

    `out` and `part` are [batch, heads, queries, head_size], `lse` and `part_lse` [batch, heads,
    queries].
    """
    share = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)  # where both see nothing
    out.lerp_(part.to(out.dtype), share[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def _takes_flash(q: Tensor) -> bool:
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
    )


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """The scaled and masked scores [B, H, Q, J], in float32 at least."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
