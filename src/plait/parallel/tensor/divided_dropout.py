"""Dropout by functions, on a rank that has a part of what is dropped: one device's masks.

    F.dropout(x)                      x * m / (1 - p)
    F.scaled_dot_product_attention    (softmax(q k^T * scale + mask) * m / (1 - p)) v

A module of dropout is replaced. A function that a forward calls is met here, in a mode of torch's
functions. N. Srivastava et al., Dropout (JMLR 2014), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.dropout_calls import dropped_by, is_attention, rate_of, shape_of
from plait.forwards import give_forward
from plait.parallel.tensor.dropout import mask_like
from plait.parallel.tensor.group import ForwardContext
from plait.values import PyTree


class DividedDropout(TorchFunctionMode):
    """The dropout of a forward, for a part of the whole."""

    def __init__(self, feature_dims: Mapping[int, int], context: ForwardContext) -> None:
        """`feature_dims` is the dim that an axis of features cuts, by the number of dims."""
        super().__init__()
        self._feature_dims = feature_dims
        self._context = context

    def __torch_function__(  # as torch calls it
        self, func: Callable[..., Any], types: Any, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        named = kwargs or {}
        rate = rate_of(func, args, named)
        if not rate or len(shape_of(func, args, named)) not in self._feature_dims:
            return func(*args, **named)
        mask = partial(self._mask, rate=rate)
        if is_attention(func):
            return attention(mask, *args, **named)
        x = dropped_by(args, named)
        return x * mask(x)

    def _mask(self, x: Tensor, rate: float) -> Tensor:
        return mask_like(x, rate, self._context, self._feature_dims[x.dim()])


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


def divide_dropout(
    module: nn.Module, feature_dims: Mapping[int, int], context: ForwardContext
) -> None:
    """Let the forward of a module run with the masks of one device, cut for this rank."""
    before = module.forward

    def run(*args: PyTree, **named: PyTree) -> PyTree:
        with DividedDropout(feature_dims, context):
            return before(*args, **named)

    give_forward(module, run)
