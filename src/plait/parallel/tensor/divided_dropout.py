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

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.dropout_calls import dropped_by, is_attention, rate_of, shape_of
from plait.forwards import run_under
from plait.parallel.tensor.dropout import attention, mask_like
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


def divide_dropout(
    module: nn.Module, feature_dims: Mapping[int, int], context: ForwardContext
) -> None:
    """Let the forward of a module run with the masks of one device, cut for this rank."""
    run_under(module, partial(DividedDropout, feature_dims, context))
