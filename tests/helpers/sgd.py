"""A small model under a plan: SGD in float64 on one batch that every rank draws alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.engine.engine import Engine


def sgd_engine(
    world: World, model: nn.Module, plan: str, loss: Callable[[Any, Tensor], Tensor], lr: float
) -> Engine:
    """The engine of a model under a plan, with a loss and plain SGD."""
    return plait.build(
        model,
        f"{plan} precision:float64",
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        world=world,
    )


def drawn_batch(num_samples: int) -> Any:
    """Inputs and targets, [num_samples, 6] both."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, num_samples, 6, generator=generator, dtype=torch.float64).unbind()


def three_losses(engine: Engine, batch: Any) -> list[float]:
    """The losses of three steps on a batch."""
    return [engine.step(batch, trace=False).loss for _ in range(3)]


def on_one_device(model: nn.Module, batch: Any) -> list[float]:
    """The losses of three steps in a plain loop: the squared error, SGD of rate 0.1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
