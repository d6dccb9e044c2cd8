"""`scaled_dot_product_attention` on parts of sequences: the call itself is intercepted.

So any module that calls torch's function takes part: the attention of `transformers` through its
interface, and a user's own. Queries, keys and values are those of a rank. A mask is one of the
whole sequence, or this rank's rows of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.comm.functional import transition
from plait.errors import ModelError, PlanError
from plait.parallel.context.group import ContextGroup
from plait.parallel.context.ring import masked_ring_attention
from plait.parallel.context.ring_schedule import Visibility
from plait.parallel.context.ulysses import HEADS, SEQUENCE, check_heads
from plait.values import PyTree


class Interception(TorchFunctionMode):
    """Hands the calls of `scaled_dot_product_attention` in its context to `attend`."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(
        self,
        func: Callable[..., PyTree],
        types: object,
        args: tuple[PyTree, ...] = (),
        kwargs: PyTree = None,
    ) -> PyTree:
        """Every other function is called as it is."""
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def shared_attention(  # as torch's function  # noqa: PLR0917
    group: ContextGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks. Collective, differentiable.

    Torch's own function for queries and keys that are no parts of the sequence.

    Args:
        group: the ranks, and the strategy: `ring` or `ulysses`.
        q: [batch, heads, sequence / cp, head_size].
        k: [batch, kv_heads, sequence / cp, head_size], each head for a group of queries.
        v: [batch, kv_heads, sequence / cp, value_size].
        attn_mask: broadcast to [batch, heads, sequence, sequence], or this rank's rows of that, or
            its columns. Booleans, or numbers that are added to the scores.
        dropout_p: only 0.
        is_causal: no key after the query.
        scale: of the scores; 1 / sqrt(head_size) by default.
        enable_gqa: whether `k` and `v` may have fewer heads.

    Returns:
        [batch, heads, sequence / cp, value_size].

    Raises:
        ModelError: queries and keys that are not of one sequence, or a mask of a part.
        PlanError: dropout, or heads that do not divide.
    """
    if not group.is_part(q, -2) and not group.is_part(k, -2):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    check_call(group, q, k, dropout_p, group.axis.size)
    if group.strategy == "ulysses":
        mask = _whole_rows(group, attn_mask)
        scaling = {"scale": scale, "enable_gqa": enable_gqa}
        return _by_heads(group, (q, k, v), mask, is_causal=is_causal, **scaling)
    mask = _own_rows(group, attn_mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask is not None and mask.requires_grad:
        keys, values = (group.gather(x, -2) for x in (k, v))
        return F.scaled_dot_product_attention(
            q, keys, values, mask, scale=scale, enable_gqa=enable_gqa
        )
    mask = _with_filling(group, mask)
    visibility = Visibility(causal=is_causal and mask is None, mask=mask)
    return _by_ring(group, (q, k, v), visibility, scale)


def check_call(group: ContextGroup, q: Tensor, k: Tensor, dropout: float, size: int) -> None:
    """Refuse a call that parts of one sequence cannot make. No communication.

    Queries `q` are [batch, heads, sequence / cp, head_size], keys `k` alike with their own heads.
    `size` is the number of ranks.

    Raises:
        ModelError: a shape that is no part of the sequence.
        PlanError: dropout, for which a rehearsal finds no cure, or heads that do not divide.
    """
    if not (group.is_part(q, -2) and group.is_part(k, -2)) or q.dim() != 4:
        raise ModelError(
            f"attention of queries {tuple(q.shape)} to keys {tuple(k.shape)}, and a rank has "
            f"{group.length} positions of a sequence: both have to be [B, H, {group.length}, K]"
        )
    if dropout:
        raise PlanError(
            f"attention drops {dropout:g} of its weights, which would differ on parts of a "
            "sequence; set it to 0"
        )
    if group.strategy == "ulysses":
        check_heads(size, q.shape[1], k.shape[1])


def _by_ring(
    group: ContextGroup, qkv: tuple[Tensor, Tensor, Tensor], visibility: Visibility, scale: float
) -> Tensor:
    """Keys and values travel as one: the shorter heads are filled up with zeros."""
    q, k, v = qkv
    size = v.shape[-1]
    longest = max(size, q.shape[-1])
    q, k, v = (F.pad(x, (0, longest - x.shape[-1])) for x in (q, k, v))
    natural = 1 / math.sqrt(longest)
    if not math.isclose(scale, natural, rel_tol=1e-15):
        q = q * (scale / natural)
    return masked_ring_attention(q, k, v, group, visibility)[..., :size]


def _by_heads(
    group: ContextGroup,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    **how: Any,
) -> Tensor:
    """Sequences are exchanged for heads: torch's own function on whole sequences."""
    q, k, v = qkv
    axis = group.axis
    num_heads = q.shape[1]
    if k.shape[1] % axis.size:
        k, v = (x.repeat_interleave(axis.size // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (transition(x, axis, SEQUENCE, HEADS) for x in (q, k, v))
    if group.filling:
        q, k, v = (x[:, :, : group.seq_len].contiguous() for x in (q, k, v))
    if mask is not None and mask.dim() == 4 and mask.shape[1] == num_heads:
        mask = mask.tensor_split(axis.size, dim=1)[axis.rank]
    how["enable_gqa"] = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, **how)
    out = F.pad(out, (0, 0, 0, group.filling)) if group.filling else out
    return transition(out, axis, HEADS, SEQUENCE)


def _own_rows(group: ContextGroup, mask: Tensor | None) -> Tensor | None:
    """The rows of this rank's queries, and the columns of all keys."""
    if mask is None:
        return None
    mask = _all_columns(group, mask)
    mask = group.take(mask, -2) if group.is_whole(mask, -2) else mask
    mask = mask.expand(*mask.shape[:-1], group.seq_len)
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)


def _with_filling(group: ContextGroup, mask: Tensor | None) -> Tensor | None:
    """A mask of all keys, and columns that hide the filling behind them."""
    if mask is None or not group.filling:
        return mask
    hidden = False if mask.dtype == torch.bool else -math.inf
    return F.pad(mask, (0, group.filling), value=hidden)


def _whole_rows(group: ContextGroup, mask: Tensor | None) -> Tensor | None:
    """The rows and columns of the whole sequence."""
    if mask is None:
        return None
    mask = _all_columns(group, mask)
    mask = group.gather(mask, -2) if group.is_part(mask, -2) else mask
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)


def masks_fit(group: ContextGroup, mask: Tensor | None) -> None:
    """Raise `ModelError` for a mask that was made for a part of the sequence alone.

    A mask [..., queries, keys] has 1, sequence or sequence / cp of each, not the last of both.
    """
    if mask is None or mask.dim() < 2:
        return
    if group.is_part(mask, -1) and group.is_part(mask, -2):
        raise ModelError(
            f"a mask {tuple(mask.shape)} was made from the {group.length} positions of one rank "
            "and says nothing about the others"
        )
    known = (1, group.length, group.seq_len)
    if mask.shape[-1] not in known or mask.shape[-2] not in known:
        raise ModelError(
            f"a mask {tuple(mask.shape)} fits neither {group.seq_len} positions nor a rank's "
            f"{group.length}"
        )


def _all_columns(group: ContextGroup, mask: Tensor) -> Tensor:
    masks_fit(group, mask)
    return group.gather(mask, -1) if group.is_part(mask, -1) else mask


def zeros_of(q: Tensor, v: Tensor) -> Tensor:
    """Zeros of the shape of attention's result: that of `q`, with the last dim of `v`."""
    return torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
