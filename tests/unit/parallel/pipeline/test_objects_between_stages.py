"""Tensors inside an object that blocks get, as a cache of keys, pass between stages too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from tests.helpers.threaded import threaded


class Prefixes:
    """What each block adds, kept as a cache keeps keys."""

    def __init__(self, values: Tensor) -> None:
        self.layers = list(values.unbind(-1))


class Adding(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(6, 6)

    def forward(self, x: Tensor, prefixes: Prefixes) -> Tensor:
        return (self.linear(x) + prefixes.layers[self.index]).tanh()


class Prefixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 24)
        self.blocks = nn.ModuleList(Adding(index) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        prefixes = Prefixes(self.encoder(x).unflatten(-1, (6, 4)))
        for block in self.blocks:
            x = block(x, prefixes)
        return x


def model() -> nn.Module:
    torch.manual_seed(0)
    return Prefixed().double()


def losses(world: World, models: list[nn.Module], plan: str) -> list[float]:
    engine = plait.build(
        models[world.rank],
        f"{plan} precision:float64",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        world=world,
    )
    generator = torch.Generator().manual_seed(1)
    batch: Any = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64).unbind()
    return [engine.step(batch, trace=False).loss for _ in range(3)]


@pytest.mark.parametrize("plan", ["pp2 mb1", "pp2:1f1b mb2"])
def test_they_reach_later_stages_with_their_gradients(plan: str) -> None:
    alone = threaded(1, losses, [model()], "dp1", plan="dp1")[0]
    assert threaded(2, losses, [model(), model()], plan, plan=plan)[0] == pytest.approx(
        alone, rel=1e-12
    )
