"""SUMMA: the products of a q x q grid, panel by panel, or gathered once where the panels are small.

R. van de Geijn and J. Watts, SUMMA: Scalable Universal Matrix Multiplication Algorithm, 1997,
section 3. Blocks: X [rows, in / q], W [out / q, in / q], Y [rows, out / q], rows of this row of
ranks.

    column      for t: X_t travels along the row, W_t along the column      Y += X_t W_t^T
      backward  for t: the same two panels                                  sum dY W_t at column t,
                                                                            dY^T X_t at row t
    row         for t: W_t travels along the column                         sum X W_t^T at column t
      backward  for t: dY_t along the row, W_t along the column             dX += dY_t W_t,
                                                                            sum dY_t^T X at row t

While panels t multiply, panels t + 1 travel: at most two of each are in memory. Both ways send the
same bytes. Gathering is one large product and two collectives instead of q of each, and holds q
panels. It is chosen up to `limit_bytes` of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.comm import Axis, Work
from plait.parallel.tensor.group import ForwardContext
from plait.parallel.tensor.products import Gathered, PanelMove
from plait.products import Products
from plait.values import AutogradContext


@dataclass(frozen=True)
class Summa:
    """x weight^T + bias on a q x q grid: `x` is given for a column, `y` for a row.

    Called with this rank's blocks: `x` [..., in / q], `weight` [out / q, in / q], `bias` [out / q]
    -> [..., out / q]. Collective and differentiable. Above `limit_bytes` of panels it streams them.
    """

    weight: PanelMove
    x: PanelMove | None = None
    y: PanelMove | None = None
    limit_bytes: int = 64 << 20

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: ForwardContext
    ) -> Tensor:
        panel_numel = weight.numel()
        if self.x is not None:
            panel_numel += x.numel()
        axis = self.weight.axis
        num_bytes = axis.size * panel_numel * x.element_size()
        streams = axis.size > 1 and axis.paths.beyond(
            "grid_panel_bytes", num_bytes, self.limit_bytes
        )
        context.choices["streamed" if streams else "gathered"] += 1
        if not streams:
            return Gathered(self.x, self.weight, self.y)(x, weight, bias, context)
        product: Tensor = _Streamed.apply(x, weight, self, context.products)
        return product if bias is None else product + bias


def panels(travelling: Sequence[tuple[Axis, Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
    """(t, the panels that the ranks t of the axes own) for every t. Collective.

    The next panels are sent meanwhile. Not differentiable.

    Args:
        travelling: axes of one size, each with this rank's panel. Panels are contiguous, of any
            shape, alike on the ranks of their axis.

    Returns:
        For each t one panel an axis, of the shape of this rank's.
    """

    def start(t: int) -> list[tuple[Tensor, Work]]:
        sent = []
        for axis, local in travelling:
            panel = local if axis.rank == t else torch.empty_like(local)
            sent.append((panel, axis.broadcast(panel, t)))
        return sent

    size = travelling[0][0].size
    ahead = start(0)
    for t in range(size):
        current = ahead
        ahead = start(t + 1) if t + 1 < size else []
        for _, work in current:
            work.wait()
        yield t, [panel for panel, _ in current]


class Sums:
    """Partial sums that are reduced to the rank that owns each, while the next is computed."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._own = torch.empty(0)
        self._work: Work | None = None

    def add(self, t: int, partial: Tensor) -> None:
        """Start the sum that belongs to rank t of the axis. Collective.

        `partial`: this rank's term, of any shape, alike on all ranks, contiguous; overwritten.
        """
        self.finish()
        self._work = self._axis.reduce(partial, t)
        if t == self._axis.rank:
            self._own = partial

    def finish(self) -> Tensor:
        """The sum that this rank owns, of the shape of its terms, once every `add` is done."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._own


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, weight: Tensor, product: Summa, products: Products
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product = product
        ctx.products = products
        rows = _rows(x)
        block = weight.contiguous()
        if product.x is not None:
            y = rows.new_zeros(rows.shape[0], block.shape[0])
            for _, (x_t, w_t) in panels([(product.x.axis, rows), (product.weight.axis, block)]):
                products.into(y, x_t, w_t, add=True)
        else:
            assert product.y is not None
            sums = Sums(product.y.axis)
            for t, (w_t,) in panels([(product.weight.axis, block)]):
                sums.add(t, products.linear(rows, w_t, None))
            y = sums.finish()
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product: Summa = ctx.product
        products: Products = ctx.products
        rows = _rows(x)
        block = weight.contiguous()
        dy = _rows(gradients[0])
        weights = Sums(product.weight.axis)
        if product.x is not None:
            inputs = Sums(product.x.axis)
            for t, (w_t, x_t) in panels([(product.weight.axis, block), (product.x.axis, rows)]):
                inputs.add(t, products.product(dy, w_t))
                weights.add(t, products.weight_grad(dy.t(), x_t))
            dx = inputs.finish()
        else:
            assert product.y is not None
            dx = torch.zeros_like(rows)
            for t, (w_t, dy_t) in panels([(product.weight.axis, block), (product.y.axis, dy)]):
                products.into(dx, dy_t, w_t.t(), add=True)
                weights.add(t, products.weight_grad(dy_t.t(), rows))
        return dx.view_as(x), weights.finish(), None, None
