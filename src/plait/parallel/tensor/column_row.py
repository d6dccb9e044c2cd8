"""The two linear layers of 1D tensor parallelism: column parallel and row parallel.

M. Shoeybi et al., Megatron-LM (2019), section 3.

    column   Y_i = X W_i^T         X is replicated, or gathered from shards
    row      Y = sum of X_i W_i^T  whole on all ranks, or scattered

With sequence parallel a column keeps its shard of X and gathers it again in backward (V.
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section
4.2.2).
The product of a row is written into memory that the peers read: the sum alone copies it. The
context knows which library multiplies (`plait.products`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.comm import Axis
from plait.comm.functional import compute_and_reduce, reduced, transition
from plait.mesh.layouts import REPLICATED, Layout, Sharded
from plait.parallel.tensor.group import ForwardContext, MatmulPlan
from plait.products import Products
from plait.torch_internals import has_dispatch_modes
from plait.values import AutogradContext


@dataclass(frozen=True)
class RowReduction:
    """The axis over which a row layer adds up, and the layout of the sum: I or S(dim)."""

    axis: Axis
    target: Layout


def column(x: Tensor, weight: Tensor, bias: Tensor | None, context: ForwardContext) -> Tensor:
    """x W^T + b of this rank's output features; differentiable.

    No communication in forward. Backward gathers `x` again if `context` has gathered it.

    Args:
        x: [..., in], whole on every rank; its gradient is a partial sum.
        weight: [out / size, in], this rank's rows.
        bias: [out / size], or None.
        context: what gathered `x` last, and how to multiply.

    Returns:
        [..., out / size], this rank's features.
    """
    saved = context.saved_shard(x)
    if saved is not None and torch.is_grad_enabled():
        saved.users += int(weight.requires_grad)
    elif not context.products.supports(x.dtype, x.device):
        return F.linear(x, weight, bias)
    shard = x if saved is None else saved.shard
    y: Tensor = _Column.apply(x, shard, weight, bias, MatmulPlan(saved, context.products))
    return y


def row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    context: ForwardContext,
    reduction: RowReduction,
) -> Tensor:
    """Sum of x W^T over the ranks, and the bias; collective and differentiable.

    Args:
        x: [..., in / size], this rank's features.
        weight: [out, in / size], this rank's columns.
        bias: [out], whole on every rank, added to the sum once; or None.
        context: how to multiply.
        reduction: the axis of `size` ranks, and the layout of the sum.

    Returns:
        [..., out], whole on every rank under I; 1 / size of dimension d under S(d).

    Raises:
        PlanError: dimension d does not divide by the ranks.
    """
    if reduction.axis.size == 1:
        return F.linear(x, weight, bias)
    y: Tensor = _Row.apply(x, weight, bias, reduction, context.products)
    return y


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: AutogradContext,
        x: Tensor,
        shard: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: MatmulPlan,
    ) -> Tensor:  # autograd's
        ctx.save_for_backward(shard, weight)
        ctx.plan = plan
        ctx.shape = x.shape
        return plan.products.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shard, weight = ctx.saved_tensors
        plan: MatmulPlan = ctx.plan
        saved, products = plan
        dy = _rows(gradients[0])
        dx = None
        dw = None
        db = None
        if ctx.needs_input_grad[0]:
            dx = products.product(dy, weight).view(ctx.shape)
        if ctx.needs_input_grad[2]:
            whole = shard if saved is None else saved.whole(shard)
            dw = _weight_gradient(products, dy, _rows(whole), weight)
        if ctx.needs_input_grad[3]:
            db = dy.sum(0)
        return dx, None, dw, db, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: AutogradContext,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reduction: RowReduction,
        products: Products,
    ) -> Tensor:  # autograd's
        ctx.save_for_backward(x, weight)
        ctx.reduction = reduction
        ctx.products = products
        axis = reduction.axis
        target = reduction.target
        if has_dispatch_modes():  # selective recomputation recognises products by their plain form
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
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        reduction: RowReduction = ctx.reduction
        gradient = gradients[0]
        dx = None
        dw = None
        whole = gradient
        if isinstance(reduction.target, Sharded):
            whole = transition(gradient, reduction.axis, reduction.target, REPLICATED)
        dy = _rows(whole)
        if ctx.needs_input_grad[0]:
            dx = ctx.products.product(dy, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(ctx.products, dy, _rows(x), weight)
        db = _rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(products: Products, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """dy^T x, in the order in which the weight lies in memory."""
    if weight.is_contiguous():
        return products.weight_grad(dy.t(), x)
    return products.weight_grad(x.t(), dy).t()
