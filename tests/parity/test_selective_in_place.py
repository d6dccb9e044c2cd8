"""Blocks under `remat:selective` that write into the products which it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import World
from tests.helpers.sgd import drawn_batch, on_one_device, sgd_engine, three_losses
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE

Write = Callable[[Tensor], Tensor]


def added(y: Tensor) -> Tensor:
    y += 1.0
    return y.tanh()


def through_a_view(y: Tensor) -> Tensor:
    y.view(-1)[0::2] *= 0.5
    return y.tanh()


def by_relu(y: Tensor) -> Tensor:
    return F.relu(y, inplace=True)


class Products(nn.Module):
    """A block that writes into what a linear layer, a matrix product and a convolution give.

    Its recurrent layer does so itself.
    """

    def __init__(self, write: Write, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 12, bias=bias)
        self.outer = nn.Linear(12, 6, bias=bias)
        self.along = nn.Conv1d(3, 3, 3, padding=1, bias=bias)
        self.gru = nn.GRU(6, 6, batch_first=True, bias=bias)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(1, (3, 2)).repeat(1, 1, 3)  # [samples, 3, 6]
        rows = self.outer(self.write(self.inner(rows)))
        rows = rows @ self.write(rows.transpose(1, 2) @ rows)
        rows = self.gru(rows)[0]
        result: Tensor = self.write(self.along(rows)).mean(2).repeat(1, 2)
        return result


@pytest.mark.parametrize("plan", ["dp1 remat:selective", "dp2:zero3 remat:selective mb2"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("write", [added, through_a_view, by_relu])
def test_products_that_are_written_into_are_computed_again(
    write: Write, bias: bool, plan: str
) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Products(write, bias) for _ in range(2))
    model = nn.Sequential(nn.Linear(6, 6), *blocks, nn.Linear(6, 6)).double()
    batch = drawn_batch(8)
    expected = on_one_device(copy.deepcopy(model), batch)

    def on_rank(world: World) -> list[float]:
        axis = world.axis("dp")
        share = [part.tensor_split(axis.size)[axis.rank] for part in batch]
        return three_losses(sgd_engine(world, copy.deepcopy(model), plan, F.mse_loss, 0.1), share)

    for found in threaded(2 if "dp2" in plan else 1, on_rank, plan=plan):
        assert found == pytest.approx(expected, rel=TOLERANCE)
