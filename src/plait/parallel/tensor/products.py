"""Matrix products of parts that are gathered for the product alone: backward keeps the parts.

    forward    X = gather(x), W = gather(w), y = scatter(X W^T)
    backward   dY = gather(dy), X and W gathered again, dx = scatter(dY W), dw = scatter(dY^T X)

Each gather's backward is the reduce-scatter of the same line, and the other way round (the law of
`comm.transitions`). 2D, 2.5D and 3D differ in which of the three is moved along which axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.comm import Axis
from plait.comm.functional import transition
from plait.mesh.layouts import PARTIAL, REPLICATED, Sharded
from plait.parallel.tensor.group import ForwardContext, MatmulPlan
from plait.values import AutogradContext


@dataclass(frozen=True)
class PanelMove:
    """Parts along dimension `dim`, one on each rank of `axis`."""

    axis: Axis
    dim: int

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks side by side, on every rank. Collective and differentiable.

        `part` has any shape; the result is `axis.size` times as long along `dim`.
        """
        return transition(part, self.axis, Sharded(self.dim), REPLICATED)

    def scatter(self, partial: Tensor) -> Tensor:
        """This rank's part of the sum over the axis. Collective and differentiable.

        `partial` has any shape; the result is 1 / `axis.size` as long along `dim`.
        Raises `PlanError` where that does not divide.
        """
        return transition(partial, self.axis, PARTIAL, Sharded(self.dim))


@dataclass(frozen=True)
class Gathered:
    """y = scatter(gather(x) gather(w)^T) + bias; a move that is None is not made.

    Called with this rank's blocks of `x` [..., in], `weight` [out, in] and `bias` [out] -> its
    block of y [..., out]. A gather makes the dim that it names longer, the scatter makes it
    shorter. Collective and differentiable once.

    `x` is gathered once for all layers that take it one after the other (q, k and v). The sum of
    its gradients is scattered once, too.
    """

    x: PanelMove | None = None
    weight: PanelMove | None = None
    y: PanelMove | None = None

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: ForwardContext
    ) -> Tensor:
        whole = (
            x if self.x is None else context.enter(x, self.x.axis, Sharded(self.x.dim), REPLICATED)
        )
        saved = context.saved_shard(whole)
        if saved is not None and torch.is_grad_enabled():
            saved.users += int(weight.requires_grad)
        plan = MatmulPlan(saved, context.products)
        product: Tensor = _GatheredMatmul.apply(whole, x, weight, self, plan)
        return product if bias is None else product + bias


def _gather(move: PanelMove | None, part: Tensor) -> Tensor:
    return part if move is None else move.gather(part)


def _scatter(move: PanelMove | None, partial: Tensor) -> Tensor:
    return partial if move is None else move.scatter(partial)


class _GatheredMatmul(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: AutogradContext,
        whole: Tensor,
        part: Tensor,
        weight: Tensor,
        moves: Gathered,
        plan: MatmulPlan,
    ) -> Tensor:  # autograd's
        ctx.save_for_backward(part, weight)
        ctx.moves = moves
        ctx.plan = plan
        return _scatter(moves.y, plan.products.linear(whole, _gather(moves.weight, weight), None))

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        moves: Gathered = ctx.moves
        plan: MatmulPlan = ctx.plan
        saved, products = plan
        dy = _gather(moves.y, gradients[0])
        dx = None
        dw = None
        if ctx.needs_input_grad[0]:
            dx = products.product(dy, _gather(moves.weight, weight))
        if ctx.needs_input_grad[2]:
            whole = part if saved is None else saved.whole(part)
            dw = products.weight_grad(
                dy.reshape(-1, dy.shape[-1]).t(), whole.reshape(-1, whole.shape[-1])
            )
            dw = _scatter(moves.weight, dw)
        return dx, None, dw, None, None
