"""Glue that draws random numbers: every stage that runs it draws what one device draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.stages.cut import Cutting
from plait.errors import ModelError
from plait.models.losses import cross_entropy
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]
NUM_LAYERS = 4


class Noisy(nn.Module):
    """Adds noise before its layers, which all of them use, and after each of them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout)).double() for _ in range(NUM_LAYERS)
        )
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        for layer in self.layers:
            x = layer(x + noise).sin()
            noise = noise + torch.randn_like(x)
        return x


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.tensor([0, 3, 2, 5])


def losses(world: World, plan: str, counts: tuple[int, ...], dropout: float) -> list[float]:
    cutting = Cutting(counts=counts, example=batch()[0][:1])
    engine = build(
        Noisy(dropout),
        f"{plan} precision:float64",
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(blocks="layers.*", cutting=cutting),
        world=world,
    )
    return [engine.step(batch()).loss for _ in range(3)]


@pytest.mark.parametrize("counts", [(1, 3), (2, 2), (3, 1)])
def test_equals_one_device(ranks: Run, counts: tuple[int, ...]) -> None:
    (alone,) = ranks(1, losses, "mb2", (NUM_LAYERS,), 0.0, plan="mb2")
    assert len({round(loss, 9) for loss in alone}) == 3
    for found in ranks(2, losses, "pp2:1f1b mb2", counts, 0.0, plan="pp2:1f1b mb2"):
        assert found == pytest.approx(alone, rel=TOLERANCE, abs=0)


def refusal(world: World, plan: str, counts: tuple[int, ...], dropout: float) -> str:
    try:
        losses(world, plan, counts, dropout)
    except ModelError as error:
        return str(error)
    return "none"


def test_draws_between_layers_that_draw_are_refused(ranks: Run) -> None:
    for text in ranks(2, refusal, "pp2:1f1b mb2", (2, 2), 0.5, plan="pp2:1f1b mb2"):
        assert "draws random numbers between its modules, after 'layers.0'" in text
        assert "put the draw into a module of its own" in text
