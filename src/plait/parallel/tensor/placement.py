"""A rank's part of a parameter: a box of the global tensor, and how many ranks have the same
elements.

A fused matrix (q, k and v side by side) is cut inside each of its parts. As a tensor with one more
dimension it is cut into boxes again. `view` is that shape, with the same elements in the same
order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from plait.comm import Axis
from plait.mesh import Shard
from plait.mesh.boxes import Box
from plait.parallel.tensor.group import TensorGroup


@dataclass(frozen=True)
class Placement:
    """One parameter on one rank.

    Attributes:
        shape: of the whole parameter.
        view: that shape with fused dimensions apart; `box` is a box of it.
        local_shape: of this rank's tensor.
        copies: on how many ranks of the tensor axis each element lives.
        copy: which of them this rank is.
        partial: the axes over whose ranks the gradients of the copies are partial sums.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    box: Box
    local_shape: tuple[int, ...]
    copies: int
    copy: int
    partial: tuple[Axis, ...] = ()

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part [*local_shape] of the parameter `whole` [*shape], contiguous."""
        return (
            whole.reshape(self.view)[self.box.within(Box.whole(self.view))]
            .reshape(self.local_shape)
            .contiguous()
        )

    def shard(self, local: Shard) -> Shard:
        """A shard of this rank's tensor [*local_shape] as one of the whole parameter [*shape]."""
        return replace(local, global_shape=self.shape, box=self.box, view=self.view)


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank, and where it lies in the whole."""

    param: nn.Parameter
    placement: Placement


def local_parameter(param: nn.Parameter, placement: Placement) -> LocalParameter:
    """A new parameter of a part's shape; one that no rank cuts stays, as code may hold it."""
    shape = placement.local_shape
    if shape == tuple(param.shape):
        return LocalParameter(param, placement)
    row = torch.zeros(shape[-1:], dtype=param.dtype, device=param.device)
    data = row.expand(shape)  # its last dim has steps of one, as view_as_complex asks
    local = nn.Parameter(data, requires_grad=param.requires_grad)
    vars(local).update(vars(param))
    return LocalParameter(local, placement)


Cut = tuple[Axis, ...]
"""The axes that cut one dimension, the outermost first."""


def coordinate(cut: Cut) -> int:
    """Which of the parts that the axes make is this rank's."""
    index = 0
    for axis in cut:
        index = index * axis.size + axis.rank
    return index


def parts(cut: Cut) -> int:
    """Into how many parts the axes cut."""
    return math.prod(axis.size for axis in cut)


def place(
    shape: Sequence[int],
    cuts: Sequence[Cut],
    group: TensorGroup,
    *,
    fused: dict[int, int] | None = None,
    partial: Cut = (),
) -> Placement:
    """The placement of a parameter whose dimension d is cut by `cuts[d]`; `fused` says of how many
    parts a dimension is.

    The sizes divide: `roles` has checked it.
    """
    view: list[int] = []
    offset: list[int] = []
    extent: list[int] = []
    local: list[int] = []
    for dim, (size, cut) in enumerate(zip(shape, cuts, strict=True)):
        number = (fused or {}).get(dim, 1)
        if number > 1:
            view.append(number)
            offset.append(0)
            extent.append(number)
        inside = size // number // parts(cut)
        view.append(size // number)
        offset.append(coordinate(cut) * inside)
        extent.append(inside)
        local.append(number * inside)
    box = Box(tuple(offset), tuple(extent))
    holders = group.same_coordinates([axis for cut in cuts for axis in cut])
    summed = tuple(axis for axis in partial if axis.size > 1)
    return Placement(
        tuple(shape),
        tuple(view),
        box,
        tuple(local),
        len(holders),
        holders.index(group.world.rank),
        summed,
    )
