"""Fields in strips against whole fields, on simulated ranks: values and gradients, periodic and
not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.errors import DataError
from plait.parallel.context import HaloConv2d, with_halo
from tests.helpers.threaded import threaded


def field() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, 3, 12, 5), (4, 3, 3, 3), (2, 4, 12, 5)]
    x, weight, grad = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes
    )
    return x, weight, grad


def whole(periodic: bool) -> list[Tensor]:
    x, weight, grad = field()
    x = x.requires_grad_()
    weight = weight.requires_grad_()
    mode = "circular" if periodic else "constant"
    out = F.conv2d(F.pad(F.pad(x, (0, 0, 1, 1), mode=mode), (1, 1, 0, 0), mode="circular"), weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_strips_compute_what_the_whole_field_does(size: int, periodic: bool) -> None:
    def rank(world: Any) -> list[Tensor]:
        axis = world.axis("dp")
        x, weight, grad = field()
        x = x.chunk(size, -2)[axis.rank].contiguous().requires_grad_()
        weight = weight.requires_grad_()
        out = F.conv2d(
            F.pad(with_halo(x, axis, 1, periodic=periodic), (1, 1, 0, 0), mode="circular"), weight
        )
        return [
            out.detach(),
            *torch.autograd.grad(out, (x, weight), grad.chunk(size, -2)[axis.rank]),
        ]

    found = threaded(size, rank)
    expected = whole(periodic)
    torch.testing.assert_close(torch.cat([one[0] for one in found], -2), expected[0])
    torch.testing.assert_close(torch.cat([one[1] for one in found], -2), expected[1])
    torch.testing.assert_close(sum(one[2] for one in found), expected[2])


def test_a_layer_on_strips_is_the_layer_on_the_field() -> None:
    torch.manual_seed(0)
    layer = HaloConv2d(3, 3, 5, groups=3).double()
    x = field()[0]

    def rank(world: Any) -> Tensor:
        axis = world.axis("dp")
        own = HaloConv2d(3, 3, 5, groups=3, axis=axis).double()
        own.load_state_dict(layer.state_dict())
        return own(x.chunk(axis.size, -2)[axis.rank]).detach()

    torch.testing.assert_close(torch.cat(threaded(3, rank), -2), layer(x).detach())


def test_a_strip_lends_no_more_than_it_has() -> None:
    def rank(world: Any) -> None:
        with pytest.raises(DataError, match="cannot lend 4"):
            with_halo(torch.zeros(1, 1, 3, 3), world.axis("dp"), 4)

    threaded(2, rank)
