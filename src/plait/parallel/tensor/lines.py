"""The two products of a line of ranks (1D), column and row, each with what it sends and what it
keeps for backward.

    column   Y_i = X W_i^T         X is the same on all ranks, or gathered of shards
    row      Y = sum of X_i W_i^T  whole on all ranks, or scattered

With sequence parallel a column keeps its shard of X and gathers it again in backward (V.
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, section 4.2.2).
The product of a row is written into memory that the peers read, so it is copied by none but the
sum. Which library multiplies is the run's to say (`plait.products`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.comm import Axis
from plait.comm.functional import reduced, transition
from plait.comm.fused import compute_and_reduce
from plait.mesh.layouts import REPLICATED, Layout, Sharded
from plait.parallel.tensor.group import How, Run
from plait.products import Products
from plait.torch_internals import has_dispatch_modes


@dataclass(frozen=True)
class Line:
    """The ranks over which a row adds up, and what becomes of the sum: I or S(dim)."""

    axis: Axis
    target: Layout


def column(x: Tensor, weight: Tensor, bias: Tensor | None, run: Run) -> Tensor:
    """x W^T + b: `x` [..., in] whole, `weight` [out, in] and `bias` [out] in parts."""
    kept = run.kept(x)
    if kept is not None and torch.is_grad_enabled():
        kept.users += int(weight.requires_grad)
    elif not run.products.serves(x.dtype, x.device):
        return F.linear(x, weight, bias)
    y: Tensor = _Column.apply(
        x, x if kept is None else kept.shard, weight, bias, How(kept, run.products)
    )
    return y


def row(x: Tensor, weight: Tensor, bias: Tensor | None, run: Run, line: Line) -> Tensor:
    """Sum of x W^T over the line, and the bias: `x` [..., in] and `weight` [out, in] in parts."""
    if line.axis.size == 1:
        return F.linear(x, weight, bias)
    y: Tensor = _Row.apply(x, weight, bias, line, run.products)
    return y


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, x: Tensor, shard: Tensor, weight: Tensor, bias: Tensor | None, how: How
    ) -> Tensor:  # autograd's
        ctx.save_for_backward(shard, weight)
        ctx.how = how
        ctx.shape = x.shape
        return how.products.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shard, weight = ctx.saved_tensors
        how: How = ctx.how
        kept, products = how
        dy = _rows(gradients[0])
        dx = None
        dw = None
        db = None
        if ctx.needs_input_grad[0]:
            dx = products.product(dy, weight).view(ctx.shape)
        if ctx.needs_input_grad[2]:
            dw = _weight_gradient(
                products, dy, _rows(shard if kept is None else kept.whole(shard)), weight
            )
        if ctx.needs_input_grad[3]:
            db = dy.sum(0)
        return dx, None, dw, db, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, line: Line, products: Products
    ) -> Tensor:  # autograd's
        ctx.save_for_backward(x, weight)
        ctx.line = line
        ctx.products = products
        axis = line.axis
        target = line.target
        if has_dispatch_modes():  # selective recomputation counts products by their plain form
            total = reduced(products.linear(x, weight, None), axis, target)
        else:
            shape = (*x.shape[:-1], weight.shape[0])
            total = compute_and_reduce(
                axis,
                target,
                shape,
                x,
                lambda y: products.into(y.view(-1, shape[-1]), _rows(x), weight),
            )
        return total if bias is None else total.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        line: Line = ctx.line
        own = gradients[0]
        dx = None
        dw = None
        whole = (
            transition(own, line.axis, line.target, REPLICATED)
            if isinstance(line.target, Sharded)
            else own
        )
        dy = _rows(whole)
        if ctx.needs_input_grad[0]:
            dx = ctx.products.product(dy, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(ctx.products, dy, _rows(x), weight)
        db = _rows(own).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(products: Products, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """dy^T x, in the order in which the weight lies in memory."""
    return (
        products.weight_grad(dy.t(), x)
        if weight.is_contiguous()
        else products.weight_grad(x.t(), dy).t()
    )
