"""Under `zero3` code writes into a layer's result [B, T, D], which is a view."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import build
from tests.helpers.threaded import threaded


class Layers(nn.Module):
    """Layers whose results the model itself changes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            if self.how == "scaled":
                y *= 0.5
            elif self.how == "residual":
                y += x
            else:
                y = F.relu(y, inplace=True)
            x = y
        return x


def steps(world: World, plan: str, model: nn.Module) -> list[float]:
    engine = build(
        copy.deepcopy(model),
        f"{plan} precision:float64",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    loader = engine.prepare([(x, x.flip(2))] * 3)
    return [engine.step(batch, trace=False).loss for batch in loader]


@pytest.mark.parametrize("how", ["scaled", "residual", "relu"])
def test_it_equals_one_device(how: str) -> None:
    model = Layers(how).double()
    expected = threaded(1, steps, "dp1", model, plan="dp1")[0]
    found = threaded(2, steps, "dp2:zero3", model, plan="dp2:zero3")
    assert found[0] == pytest.approx(expected, rel=1e-12)
