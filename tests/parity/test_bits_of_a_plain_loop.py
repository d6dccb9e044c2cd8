"""One rank with an undivided batch has the bits of a loop in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.models.losses import cross_entropy
from tests.helpers.threaded import threaded

Loss = Callable[[Tensor, Tensor], Any]

NUM_STEPS = 3


def net() -> nn.Module:
    """[samples, 6] -> [samples, 4, 5], classes of four places."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(6, 16),
            nn.LayerNorm(16),
            nn.GELU(),
            nn.Linear(16, 20),
            nn.Unflatten(1, (4, 5)),
        )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs [7, 6] and classes [7, 4], some of them masked."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(7, 6, generator=generator)
    targets = torch.randint(0, 5, (7, 4), generator=generator)
    targets[: step + 1, 0] = -100
    return inputs, targets


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.clamp(min=0).flatten())


class Counting(nn.Module):
    """A mean that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """[samples, 4, 5] and [samples, 4] -> a number."""
        self.count += 1
        return mean(output, targets)


def by_engine(world: plait.World, loss: Loss) -> list[Tensor]:
    engine = plait.build(net(), "dp1", loss=loss, optimizer=torch.optim.AdamW, world=world)
    for step in range(NUM_STEPS):
        engine.step(batch(step), trace=False)
    return [param.detach().clone() for param in engine.model.parameters()]


@pytest.mark.parametrize("loss", [mean, cross_entropy, Counting()])
def test_one_rank_has_the_bits_of_a_plain_loop(loss: Loss) -> None:
    (found,) = threaded(1, by_engine, loss, plan="dp1")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(NUM_STEPS):
        inputs, targets = batch(step)
        measured = loss(model(inputs), targets)
        value = measured[0] / measured[1] if isinstance(measured, tuple) else measured
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    for mine, param in zip(found, model.parameters(), strict=True):
        assert torch.equal(mine, param)
