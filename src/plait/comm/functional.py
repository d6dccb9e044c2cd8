"""`transition`: the one differentiable function of the library that communicates.

One `autograd.Function` serves all rows of the table (`comm.transitions`). Its forward runs the row
of (source, target). Its backward is `transition` again, with the pair (target*, source*). So
gradients of gradients work too.

Two operations are fused with the computation of their operand, which is written into a borrowed
send buffer. Where ranks can read each other's memory, it is then sent without a copy. They are not
differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.comm.axis import Axis
from plait.comm.transitions import COLLECTIVES, backward, operation
from plait.comm.work import Work
from plait.errors import PlanError
from plait.mesh.layouts import Layout, Sharded
from plait.values import AutogradContext

Compute = Callable[[Tensor], object]
"""Writes the operand into a contiguous tensor."""


def transition(tensor: Tensor, axis: Axis, source: Layout, target: Layout) -> Tensor:
    """The tensor of all ranks of `axis`, moved from layout `source` to `target`; differentiable.

    Args:
        tensor: this rank's part: whole [...] under R, I and P; 1/size of dimension d under S(d).
        axis: the line of ranks.
        source: the layout that `tensor` has.
        target: the layout that the result has.

    Returns:
        This rank's part under `target`, waited for: whole, or 1/size of dimension d under S(d).
        Collective where the pair of layouts communicates (`comm.transitions`), and so is its
        backward.

    Raises:
        PlanError: a dimension that the tensor lacks or that does not divide by the size of the
            axis.
        RankFailed: a peer died, did not answer in time, or called something else.
    """
    return _Transition.apply(tensor, axis, source, target)


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, tensor: Tensor, axis: Axis, source: Layout, target: Layout
    ) -> Tensor:
        ctx.axis, ctx.gradient_pair = axis, backward(source, target)
        return _run(tensor, axis, source, target)

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return transition(gradients[0], ctx.axis, *ctx.gradient_pair), None, None, None


def reduced(tensor: Tensor, axis: Axis, target: Layout) -> Tensor:
    """The sum of every rank's `tensor` [...], in new memory: whole, or this rank's shard under
    S(d), 1/size of dimension d.

    Not differentiable: the forward of the rows of P. Collective.
    """
    wire = wire_of(tensor.dtype, axis)
    if wire is not None:
        return reduced(tensor.to(wire), axis, target).to(tensor.dtype)
    if isinstance(target, Sharded):
        return _reduce_scatter(tensor, axis, _dim(tensor, target))
    total = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    axis.all_reduce(tensor, out=total)
    return total


def wire_of(dtype: torch.dtype, axis: Axis) -> torch.dtype | None:
    """The narrower type in which numbers of `dtype` travel over an axis; None as they are."""
    wire = axis.wire
    narrower = wire is not None and dtype.is_floating_point and dtype.itemsize > wire.itemsize
    return wire if narrower and axis.size > 1 else None


def _run(tensor: Tensor, axis: Axis, source: Layout, target: Layout) -> Tensor:
    op = operation(source, target)
    if op == "none" or axis.size == 1:
        return tensor.view_as(tensor)
    if op not in COLLECTIVES:
        return _moved(tensor, axis, source, target)
    if tensor.is_complex():  # travels as pairs of real numbers
        pairs = torch.view_as_real(tensor.resolve_conj())
        return torch.view_as_complex(_run(pairs, axis, source, target).contiguous())
    wire = wire_of(tensor.dtype, axis)
    if wire is None:
        return _moved(tensor, axis, source, target)
    return _run(tensor.to(wire), axis, source, target).to(tensor.dtype)


def _moved(tensor: Tensor, axis: Axis, source: Layout, target: Layout) -> Tensor:
    """The operation of a pair of layouts, on numbers that travel as they are."""
    op = operation(source, target)
    if op == "all_reduce":
        return reduced(tensor, axis, target)
    if op == "keep":
        return tensor.clone() if axis.rank == 0 else torch.zeros_like(tensor)
    if isinstance(source, Sharded) and isinstance(target, Sharded):
        return _all_to_all(tensor, axis, _dim(tensor, source), _dim(tensor, target))
    sharded = source if isinstance(source, Sharded) else target
    assert isinstance(sharded, Sharded)  # the remaining rows have one sharded side
    dim = _dim(tensor, sharded)
    return {
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "slice": _slice,
        "pad": _pad,
    }[op](tensor, axis, dim)


def _all_gather(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Shards along `dim` -> the whole, each copied to its place in it."""
    shape = list(tensor.shape)
    whole = tensor.new_empty((*shape[:dim], axis.size, *shape[dim:]))
    axis.all_gather(whole.movedim(dim, 0), tensor).wait()
    return whole.flatten(dim, dim + 1)


def _reduce_scatter(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Partial sums -> this rank's shard along `dim` of their sum."""
    parts = tensor.unflatten(dim, (axis.size, _part_length(tensor, axis, dim))).movedim(dim, 0)
    out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    axis.reduce_scatter(out, parts).wait()
    return out


def _all_to_all(tensor: Tensor, axis: Axis, source: int, target: int) -> Tensor:
    """Sharded along `source` -> sharded along `target`."""
    parts = _split(tensor, axis, target)
    arrived = torch.empty_like(parts)
    axis.all_to_all(arrived, parts).wait()
    return _join(arrived, source)


def _slice(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    length = _part_length(tensor, axis, dim)
    return tensor.narrow(dim, axis.rank * length, length).clone(
        memory_format=torch.contiguous_format
    )


def _pad(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    shape = list(tensor.shape)
    length = shape[dim]
    shape[dim] *= axis.size
    whole = tensor.new_zeros(shape)
    whole.narrow(dim, axis.rank * length, length).copy_(tensor)
    return whole


def _split(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """(.., size * n, ..) -> (size, .., n, ..), contiguous."""
    length = _part_length(tensor, axis, dim)
    return tensor.unflatten(dim, (axis.size, length)).movedim(dim, 0).contiguous()


def _join(parts: Tensor, dim: int) -> Tensor:
    """(size, .., n, ..) -> (.., size * n, ..): the inverse of `_split`."""
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _dim(tensor: Tensor, layout: Sharded) -> int:
    if not -tensor.dim() <= layout.dim < tensor.dim():
        raise PlanError(
            f"{layout}: a tensor of shape {tuple(tensor.shape)} has no dimension {layout.dim}"
        )
    return layout.dim % tensor.dim()


def _part_length(tensor: Tensor, axis: Axis, dim: int) -> int:
    length, rest = divmod(tensor.shape[dim], axis.size)
    if rest:
        raise PlanError(
            f"dimension {dim} of shape {tuple(tensor.shape)} does not divide by the {axis.size} "
            f"ranks of axis {axis.name}"
        )
    return length


def compute_and_reduce(
    axis: Axis, target: Layout, shape: Sequence[int], like: Tensor, compute: Compute
) -> Tensor:
    """The sum over the axis of the operand that `compute` writes on each rank. Collective.

    Args:
        axis: the ranks that add up.
        target: R or I for the whole sum [*shape], S(d) for this rank's shard of it, 1/size of
            dimension d.
        shape: of the operand.
        like: a tensor of the type and device of the operand; of any shape.
        compute: writes the operand, into a contiguous tensor of that shape.
    """
    rounds = wire_of(like.dtype, axis) is not None
    buffer = like.new_empty(tuple(shape)) if rounds else axis.borrow(shape, like)
    compute(buffer)
    return reduced(buffer, axis, target)


def compute_and_shift(axis: Axis, out: Tensor, by: Sequence[int], compute: Compute) -> Work:
    """Send parts round the ring, part i to coordinate `rank + by[i]`, and add those that come to
    `out` [...], contiguous.

    `compute` writes the parts, (len(by), *out.shape); `by` is alike on all ranks. Collective.

    Raises:
        PlanError: a distance that leads back to this rank.
    """
    buffer = axis.borrow((len(by), *out.shape), out)
    compute(buffer)
    return axis.shift_and_add(out, buffer, by)
