"""Matrix products of parts that are gathered for the product alone: what is kept for backward are the parts.

    forward    X = gather(x), W = gather(w), y = scatter(X W^T)
    backward   dY = gather(dy), X and W gathered again, dx = scatter(dY W), dw = scatter(dY^T X)

Each gather's backward is the reduce-scatter of the same line, and the other way round (the law of `comm.transitions`).
2D, 2.5D and 3D differ in which of the three is moved along which axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.comm import Axis
from plait.comm.functional import transition
from plait.mesh.layouts import PARTIAL, REPLICATED, Sharded
from plait.tensor.group import Run


@dataclass(frozen=True)
class Move:
    """Parts along dimension `dim`, one on each rank of `axis`."""

    axis: Axis
    dim: int

    def gather(self, part: Tensor) -> Tensor:
        """All parts."""
        return transition(part, self.axis, Sharded(self.dim), REPLICATED)

    def scatter(self, partial: Tensor) -> Tensor:
        """The own part of the sum over the axis."""
        return transition(partial, self.axis, PARTIAL, Sharded(self.dim))


@dataclass(frozen=True)
class Gathered:
    """y = scatter(gather(x) gather(w)^T); a move that is None is not made."""

    x: Move | None = None
    weight: Move | None = None
    y: Move | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, run: Run) -> Tensor:
        product: Tensor = _Product.apply(x, weight, self)
        return product if bias is None else product + bias


def _gather(move: Move | None, part: Tensor) -> Tensor:
    return part if move is None else move.gather(part)


def _scatter(move: Move | None, partial: Tensor) -> Tensor:
    return partial if move is None else move.scatter(partial)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, moves: Gathered) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.moves = moves
        return _scatter(moves.y, _gather(moves.x, x) @ _gather(moves.weight, weight).t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        moves: Gathered = ctx.moves
        dy = _gather(moves.y, gradients[0])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _scatter(moves.x, dy @ _gather(moves.weight, weight))
        if ctx.needs_input_grad[1]:
            whole = _gather(moves.x, x)
            dw = _scatter(moves.weight, dy.reshape(-1, dy.shape[-1]).t() @ whole.reshape(-1, whole.shape[-1]))
        return dx, dw, None
