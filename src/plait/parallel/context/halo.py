"""Halo exchange: each rank holds a strip of a field, and its neighbours' edges where a stencil
reaches over.

`with_halo` lengthens a strip by `width` rows on both sides. Its backward sends the gradients of
these rows to their owners and adds them there. A convolution on strips then has the gradients of
one on the whole field. A convolution's weights are used on every strip. Their gradients are summed
over the axis, as over any axis whose ranks have other data. Fields are [batch, channels, height,
width], and the height is cut.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import Axis
from plait.errors import DataError
from plait.values import AutogradContext


def with_halo(x: Tensor, axis: Axis, width: int, *, dim: int = -2, periodic: bool = True) -> Tensor:
    """`x` with `width` rows of the neighbours before and after its own along `dim`.

    Collective and differentiable; backward is collective, too.

    Args:
        x: of any shape, this rank's strip, as long as every other; a field is [batch, channels,
            height / size, width].
        axis: the `size` ranks in the order of the strips.
        width: rows that each neighbour lends.
        dim: the dimension that is cut.
        periodic: the first and the last rank are neighbours; else zeros stand beyond the field.

    Returns:
        The strip, longer by 2 `width` along `dim`.

    Raises:
        DataError: a strip is thinner than what its neighbour borrows.
    """
    if x.shape[dim] < width:
        raise DataError(
            f"a rank with {x.shape[dim]} rows cannot lend {width} to its neighbour; "
            f"take fewer ranks on {axis.name}, or a larger field"
        )
    if width == 0:
        return x
    longer: Tensor = _Halo.apply(x, axis, width, (dim, periodic))
    return longer


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, axis: Axis, width: int, how: tuple[int, bool]
    ) -> Tensor:
        dim, ctx.periodic = how
        ctx.axis = axis
        ctx.width = width
        ctx.dim = dim
        length = x.shape[dim]
        above, below = _swap(axis, x.narrow(dim, 0, width), x.narrow(dim, length - width, width))
        if not ctx.periodic:
            above, below = _inside(axis, above, below)
        return torch.cat((above, x, below), dim)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        dim = ctx.dim
        width = ctx.width
        length = grad.shape[dim] - 2 * width
        above = grad.narrow(dim, 0, width)
        below = grad.narrow(dim, length + width, width)
        if not ctx.periodic:
            above, below = _inside(ctx.axis, above, below)
        from_above, from_below = _swap(ctx.axis, above, below)
        inner = grad.narrow(dim, width, length).clone()
        inner.narrow(dim, 0, width).add_(from_above)
        inner.narrow(dim, length - width, width).add_(from_below)
        return inner, None, None, None


def _swap(axis: Axis, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Send `first` to the rank before and `last` to the rank after -> the rows that they sent."""
    first = first.contiguous()
    last = last.contiguous()
    before = torch.empty_like(last)
    after = torch.empty_like(first)
    works = [axis.shift(before, last, 1), axis.shift(after, first, -1)]
    for work in works:
        work.wait()
    return before, after


def _inside(axis: Axis, above: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros where there is no neighbour."""
    return (
        torch.zeros_like(above) if axis.rank == 0 else above,
        torch.zeros_like(below) if axis.rank == axis.size - 1 else below,
    )


class HaloConv2d(nn.Conv2d):
    """A convolution of a periodic field in strips over `axis`, of the size of its input.

    Kernels are square and odd. Without an axis the field is whole.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        axis: Axis | None = None,
        groups: int = 1,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, groups=groups)
        self._axis = axis
        self._reach = kernel_size // 2

    def forward(self, x: Tensor) -> Tensor:
        """[batch, in, height / size, width] -> [batch, out, height / size, width]. Collective.

        Rows come from the neighbours, columns from the other side of the field. Differentiable.
        Raises `DataError` for strips thinner than half of the kernel.
        """
        reach = self._reach
        if self._axis is None:
            return super().forward(F.pad(x, (reach,) * 4, mode="circular"))
        x = with_halo(x, self._axis, reach)
        return super().forward(F.pad(x, (reach, reach, 0, 0), mode="circular"))
