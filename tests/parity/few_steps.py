"""A model that is trained on one batch for a few steps, under a plan and by a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import build

STEPS = 3
Pair = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def drawn(model: nn.Module) -> nn.Module:
    """The model in double precision, with the same values in every process."""
    generator = torch.Generator().manual_seed(2)
    for param in model.double().parameters():
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)
    return model


def batch(width: int) -> Pair:
    """Four vectors, and others as their targets."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, width, generator=generator, dtype=torch.float64)
    return inputs, inputs.flip(0)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def losses(
    world: World, model: nn.Module, plan: str, pair: Pair, loss: Loss = F.mse_loss, **how: Any
) -> list[float]:
    """The losses of some steps under a plan."""
    engine = build(
        model,
        f"{plan} precision:float64",
        loss=loss,
        optimizer=optimizer,
        world=world,
        **how,
    )
    return [engine.step(pair).loss for _ in range(STEPS)]


def plain(model: nn.Module, pair: Pair, loss: Loss = F.mse_loss) -> list[float]:
    """The losses of the same steps of a plain loop on one device."""
    update = optimizer(model.parameters())
    inputs, targets = pair
    numbers = []
    for _ in range(STEPS):
        value = loss(model(inputs), targets)
        numbers.append(float(value.detach()))
        update.zero_grad()
        value.backward()
        update.step()
    return numbers
