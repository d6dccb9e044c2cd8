"""Blocks that a forward calls again on what they gave, as those of a model of shared depth."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import World
from tests.helpers.sgd import drawn_batch, on_one_device, sgd_engine, three_losses
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE


class Block(nn.Module):
    """A residual block, of which some layers may be frozen."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.silu(self.up(x)))
        return result


class Deep(nn.Module):
    """Three blocks, each called twice."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Block(frozen if place == 0 else "") for place in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(layer(x))
        return x


@pytest.mark.parametrize("plan", ["dp2:zero3", "dp2:zero3 mb2", "dp2:zero3 remat:full", "dp2"])
@pytest.mark.parametrize("frozen", ["", "up", "up.weight", "down"])
def test_a_block_that_runs_on_what_it_gave_trains_as_on_one_device(frozen: str, plan: str) -> None:
    torch.manual_seed(0)
    model = Deep(frozen).double()
    batch = drawn_batch(8)
    expected = on_one_device(copy.deepcopy(model), batch)

    def on_rank(world: World) -> list[float]:
        axis = world.axis("dp")
        share = [part.tensor_split(axis.size)[axis.rank] for part in batch]
        return three_losses(sgd_engine(world, copy.deepcopy(model), plan, F.mse_loss, 0.1), share)

    for found in threaded(2, on_rank, plan=plan):
        assert found == pytest.approx(expected, rel=TOLERANCE)
