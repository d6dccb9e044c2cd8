"""Dropout of positions that a forward has put into rows: split ranks draw one device's mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]


class Flattened(nn.Module):
    """Two layers with dropout between, over samples and positions in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, positions, 4] -> the same."""
        y: Tensor = self.last(self.dropout(self.first(x.flatten(0, 1)).relu()))
        return y.unflatten(0, (-1, x.shape[1]))


def losses(world: World, plan: str, samples: int) -> list[float]:
    torch.manual_seed(3)
    engine = plait.build(
        Flattened().double(),
        f"{plan} precision:float64",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, 4, generator=draw, dtype=torch.float64)
    return [engine.step((x, torch.zeros_like(x))).loss for _ in range(3)]


@pytest.mark.parametrize(
    ("plan", "samples"), [("tp2", 8), ("tp4:2d", 8), ("tp4:2d", 7)], ids=["1d", "2d", "2d_filled"]
)
def test_equals_one_device(ranks: Run, plan: str, samples: int) -> None:
    (alone,) = ranks(1, losses, "dp1", samples, plan="dp1")
    for found in ranks(4 if "4" in plan else 2, losses, plan, samples, plan=plan):
        assert found == pytest.approx(alone, rel=TOLERANCE, abs=0)
