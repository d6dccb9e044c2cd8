"""Glue that writes into what a block returned: every stage does it once, on tensors of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.stages.cut import Cutting
from plait.models.losses import cross_entropy
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]


class Scaled(nn.Module):
    """Scales its embeddings in place, between two of its units."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(4))
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x *= 3.0
        for layer in list(self.layers)[1:]:
            x = layer(x).sin()
        return x


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.tensor([0, 3, 2, 5])


def losses(world: World, plan: str, counts: tuple[int, ...]) -> list[float]:
    engine = build(
        Scaled(),
        f"{plan} precision:float64",
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(blocks="layers.*", cutting=Cutting(counts=counts, example=batch()[0][:1])),
        world=world,
    )
    found = [engine.evaluate(batch())]
    found += [engine.step(batch()).loss for _ in range(3)]
    return [*found, engine.evaluate(batch())]


def plain() -> list[float]:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch()
    found = []
    for _ in range(4):
        loss = F.cross_entropy(model(inputs), targets)
        found.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [found[0], *found]


@pytest.mark.parametrize("counts", [(1, 3), (2, 2), (3, 1)])
def test_equals_one_device(ranks: Run, counts: tuple[int, ...]) -> None:
    """The cut is before, at and behind the place of the writing."""
    plan = "pp2:1f1b mb2"
    for found in ranks(2, losses, plan, counts, plan=plan):
        assert found == pytest.approx(plain(), rel=TOLERANCE, abs=0)
