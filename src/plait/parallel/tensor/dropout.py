"""Dropout of tensors in parts, with the masks of one device.

Each rank draws the mask of the whole tensor from one state of the generator, and cuts its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.parallel.tensor.group import ActivationLayout, ForwardContext


class Dropout(nn.Module):
    """Dropout with the mask of one device: each rank draws the whole tensor's mask and cuts it.

    The price is a whole mask on each rank (bytes of the unsharded activation, for a moment). It
    makes a run with dropout provable. Ranks that hold the same activations drop the same elements.
    """

    def __init__(
        self,
        p: float,
        context: ForwardContext,
        feature_dims: Mapping[int, int] | None = None,
        *,
        inplace: bool = False,
    ) -> None:
        """`feature_dims` is the dim that an axis of features cuts, by the number of dims.

        It is 1 of 4 for heads, and the last one of tensors that it does not name.
        """
        super().__init__()
        self.p = p
        self.inplace = inplace
        self._context = context
        self._feature_dims = feature_dims or {}

    def forward(self, x: Tensor) -> Tensor:
        """`x` of any shape -> a tensor of its shape, or `x` itself in place. Differentiable.

        No communication. The mean is kept: what is not dropped is divided by 1 - p.
        """
        if not self.training or self.p == 0.0:
            return x
        dim = self._feature_dims.get(x.dim(), -1)
        mask = mask_like(x, self.p, self._context, dim)
        return x.mul_(mask) if self.inplace else x * mask


def split(module: nn.Dropout, context: ForwardContext, feature_dims: Mapping[int, int]) -> Dropout:
    """The module that drops parts as another one drops the whole."""
    return Dropout(module.p, context, feature_dims, inplace=module.inplace)


def mask_like(
    x: Tensor,
    p: float,
    context: ForwardContext,
    feature_dim: int = -1,
    *,
    layout: ActivationLayout | None = None,
) -> Tensor:
    """This rank's part of the mask that one device would draw for the whole tensor.

    Nothing is drawn for padding rows. Otherwise the next mask would differ from that of one device.
    No communication: every rank draws the whole mask from one state of the generator.

    Args:
        x: [samples, ...] of any shape, this rank's part.
        p: the share of elements that are dropped.
        context: the rows of the micro-batch, and the layout that the last layer left.
        feature_dim: the dim that an axis of features cuts.
        layout: of `x`; by default that of `context`.

    Returns:
        A tensor of the shape of `x`: 0 or 1 / (1 - p).
    """
    if p == 1:
        return torch.zeros_like(x)  # torch draws nothing then
    known = context.layout if layout is None else layout
    filled, *others = known.global_shape(x.shape, feature_dim)
    real = _real_rows(filled, context.num_rows, known)
    mask = drawn_like(x, (real, *others)).bernoulli_(1 - p)
    if real < filled:
        mask = torch.cat([mask, mask[:1].expand(filled - real, *others)])
    return known.local_part(mask, feature_dim).div(1 - p)


def _real_rows(filled: int, num_samples: int, layout: ActivationLayout) -> int:
    """How many of `filled` rows, of all ranks, belong to samples that fill nothing up.

    A sample may have several rows, as flattened positions.
    """
    if not num_samples or layout.samples is None:
        return min(num_samples or filled, filled)
    of_ranks = num_samples + -num_samples % layout.samples.size
    each = filled // of_ranks if filled % of_ranks == 0 else 1
    return min(each * num_samples, filled)


def drawn_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Empty memory [*shape] whose dims lie in the order of those of `x`.

    Numbers are drawn along it. `x` has any shape of as many dims; values are not read.
    """
    strides = torch.empty_like(x, device="meta").stride()
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
    memory = torch.empty([shape[dim] for dim in order], dtype=x.dtype, device=x.device)
    return memory.permute([order.index(dim) for dim in range(x.dim())])


def attention(  # noqa: PLR0917 (as torch's function is called)
    mask_of: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of this rank's heads, with its arguments. Differentiable.

    `SplitAttention` has a formula of its own. Torch's module scales queries before the product, so
    that the last bits differ.

    No communication. `dropout_p` is not read: `mask_of` knows it.

    Args:
        mask_of: weights [samples, heads, queries, keys] -> what they are multiplied by.
        query: [samples, heads, queries, head_size].
        key: [samples, heads of keys, keys, head_size]; so is `value`.
        attn_mask: true where a key is seen, or what is added. It has the shape of the weights, or
            one that is stretched to it.
        is_causal: whether a query sees the keys up to its own position alone.
        scale: of the scores; by default head_size to the power of -1/2.
        enable_gqa: whether each head of keys is for a group of heads of queries.

    Returns:
        A tensor of the shape of `query`.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    sees_nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(sees_nothing, 0.0).softmax(-1).masked_fill(sees_nothing, 0.0)
    return weights * mask_of(weights) @ value


class AttentionWithDropout(nn.Module):
    """softmax(q k^T / sqrt(head_size)) v over the past, weights dropped as on one device."""

    def __init__(self, p: float, context: ForwardContext) -> None:
        super().__init__()
        self.dropout = p
        self._context = context

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attention over this rank's samples and heads. No communication; differentiable.

        Args:
            q: [batch, heads / size, sequence, head_size], where `size` ranks cut the features.
            k: [batch, kv_heads / size, sequence, head_size], each head for a group of queries.
            v: of the shape of `k`.
            documents: [batch, sequence]: a query sees keys of its own document alone.

        Returns:
            A tensor of the shape of `q`.
        """
        groups = q.shape[1] // k.shape[1]
        length = q.shape[-2]
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
        if not self.training:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=groups > 1)
        mask = partial(mask_like, p=self.dropout, context=self._context, feature_dim=1)
        return attention(mask, q, k, v, seen, enable_gqa=groups > 1)
