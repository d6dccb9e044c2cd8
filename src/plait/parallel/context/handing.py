"""The state of a scan handed from rank to rank, and the positions that a convolution looks back.

A rank holds pieces of the sequence: one, or an early and a late one under ring attention. Each
piece begins from the state in which the one before it ended. So states travel once along the ranks,
and under ring attention back again:

    n = 2, ring      rank 0: piece 0 .......... piece 3      rank 1: .. piece 1, piece 2 ..

The gradients of states travel the other way. A rank waits for the state of the one before. No rank
holds the whole sequence, and none computes a position of another.

The last positions of each piece are gathered for convolutions, as the rows of a halo.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from plait.comm import Axis
from plait.comm.functional import transition
from plait.mesh.layouts import REPLICATED, Sharded
from plait.parallel.context.group import ContextGroup
from plait.parallel.context.scans import SEQUENCE, Carrier, Dims, handing
from plait.torch_internals import no_dispatch_modes
from plait.values import AutogradContext, PyTree


class Handing:
    """Answers the calls of carriers on this rank's part of a sequence."""

    def __init__(self, group: ContextGroup) -> None:
        self._group = group
        self._results: dict[PyTree, tuple[Tensor, bool]] = {}  # without values, by their shapes

    def __call__(self, learned: Dims, carrier: Carrier, args: PyTree, kwargs: PyTree) -> PyTree:
        """The function's result for this rank's positions. Collective and differentiable.

        A scan takes parts [batch, sequence / cp, ...], a convolution [batch, channels, sequence /
        cp]. The result is cut alike. `learned` names the arguments that are parts of sequences, as
        `noted` has written them.
        """
        bound = carrier.bound(args, kwargs)
        dims = {
            name: dim
            for name in bound.arguments
            if (dim := learned.get(noted(carrier, name))) is not None
            and self._group.is_part(bound.arguments[name], dim)
        }
        with handing(None):
            if not dims:
                return carrier.function(*args, **kwargs)
            if carrier.is_convolution:
                return self._convolve(carrier, bound, *dims)
            return self._scan(carrier, bound, dims)

    def _convolve(self, carrier: Carrier, bound: inspect.BoundArguments, name: str) -> Tensor:
        """Each piece with the positions before it, [batch, channels, sequence / cp] in all."""
        x = bound.arguments[name]
        reach = bound.arguments["weight"].shape[-1] - 1
        outputs = []
        for before, piece in zip(self._before(x, reach), self._pieces(x, -1), strict=True):
            bound.arguments[name] = torch.cat((before, piece), -1)
            outputs.append(_call(carrier, bound)[..., reach:])
        return torch.cat(outputs, -1)

    def _before(self, x: Tensor, reach: int) -> list[Tensor]:
        """The `reach` positions before each piece; zeros before the sequence."""
        group = self._group
        pieces = self._pieces(x, -1)
        kept = min(reach, pieces[0].shape[-1])
        if kept == 0:
            return [piece[..., :0] for piece in pieces]
        tails = torch.cat([piece[..., -kept:] for piece in pieces], -1)
        whole = transition(tails, group.axis, Sharded(x.dim() - 1), REPLICATED).split(kept, -1)
        places = [chunk for rank in range(group.axis.size) for chunk in group.chunks(rank)]
        in_order = [whole[places.index(chunk)] for chunk in range(group.num_chunks)]
        row = torch.cat([x.new_zeros((*x.shape[:-1], reach)), *in_order], -1)
        ends = group.chunks(group.axis.rank)  # a first piece uses the row too: ranks go back alike
        return [row.narrow(-1, end * kept, reach) for end in ends]

    def _scan(self, carrier: Carrier, bound: inspect.BoundArguments, dims: Dims) -> PyTree:
        """Each piece from the state of the one before it, [batch, sequence / cp, ...] in all."""
        group, axis = self._group, self._group.axis
        owners = {chunk: rank for rank in range(axis.size) for chunk in group.chunks(rank)}
        pieces = {name: self._pieces(bound.arguments[name], dim) for name, dim in dims.items()}
        like, is_pair = self._result_of(carrier, bound, dims)
        tensors = [name for name, one in bound.arguments.items() if _is_float(one)]
        outputs: list[Tensor] = []
        state: Tensor | None = None
        for number, chunk in enumerate(group.chunks(axis.rank)):
            bound.arguments.update({name: pieces[name][number] for name in dims})
            source, to = owners.get(chunk - 1), owners.get(chunk + 1)
            if source is not None and source != axis.rank:
                given = [*outputs[-1:], *(bound.arguments[name] for name in tensors)]
                state, *given = _Arrive.apply(axis, source, like, *given)
                outputs[-1:] = given[: len(given) - len(tensors)]
                inputs = given[len(given) - len(tensors) :]
                bound.arguments.update(zip(tensors, inputs, strict=True))
            bound.arguments.update({carrier.first: state, carrier.last: True})
            output, state = _call(carrier, bound)
            if to is not None and to != axis.rank:
                output = _Leave.apply(axis, to, output, state)
            outputs.append(output)
        whole = torch.cat(outputs, SEQUENCE)
        return (whole, None) if is_pair else whole

    def _result_of(
        self, carrier: Carrier, bound: inspect.BoundArguments, dims: Dims
    ) -> tuple[Tensor, bool]:
        """A state without values, and whether a call that asks for none gets a pair.

        Seen in calls with one position.
        """
        arguments = dict(bound.arguments)
        for name, dim in dims.items():
            arguments[name] = arguments[name].narrow(dim, 0, 1)
        shapes = [(x.shape, x.dtype) for x in arguments.values() if isinstance(x, Tensor)]
        key = (carrier.function, tuple(shapes))
        if key not in self._results:
            arguments = tree_map_only(Tensor, _without_values, arguments)
            one = inspect.BoundArguments(bound.signature, OrderedDict(arguments))
            with torch.no_grad(), no_dispatch_modes():
                is_pair = isinstance(_call(carrier, one), tuple)
                one.arguments[carrier.last] = True
                self._results[key] = _call(carrier, one)[1], is_pair
        return self._results[key]

    def _pieces(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        return x.chunk(len(self._group.chunks(0)), dim)


def noted(carrier: Carrier, argument: str) -> str:
    """The name under which the dim of an argument is kept."""
    return f"{carrier.function.__name__}.{argument}"


def _call(carrier: Carrier, bound: inspect.BoundArguments) -> PyTree:
    return carrier.function(*bound.args, **bound.kwargs)


def _is_float(value: PyTree) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


class _Arrive(torch.autograd.Function):
    """The state of the rank before, and what is computed from it or before it, as it was.

    Its backward sends the state's gradient back, and comes after that of all later work.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext, axis: Axis, source: int, like: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.source = axis, source
        state = torch.empty(like.shape, dtype=like.dtype, device=given[0].device)
        axis.receive(state, source).wait()
        return state, *(one.view_as(one) for one in given)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.axis.send(grads[0].contiguous(), ctx.source).wait()
        return None, None, None, *grads[1:]


class _Leave(torch.autograd.Function):
    """A piece's output as it was, and its state on the way to the rank behind.

    Its backward takes the state's gradient from there.
    """

    @staticmethod
    def forward(ctx: AutogradContext, axis: Axis, to: int, output: Tensor, state: Tensor) -> Tensor:
        ctx.axis, ctx.to = axis, to
        ctx.like = _without_values(state)
        axis.send(state.contiguous(), to).wait()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = torch.empty(ctx.like.shape, dtype=ctx.like.dtype, device=grads[0].device)
        ctx.axis.receive(grad, ctx.to).wait()
        return None, None, grads[0], grad
