"""A script of one device under a plan: its optimizer and loader become those of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.loss import LossFunction
from plait.models.parameters import Parameters
from plait.plan import Plan
from plait.values import PyTree


def prepare(
    model: nn.Module,
    loader: Iterable[PyTree],
    plan: Plan | str,
    *,
    loss: LossFunction,
    optimizer: Callable[[Parameters], torch.optim.Optimizer] | torch.optim.Optimizer,
    options: Options | None = None,
    world: World | None = None,
) -> tuple[Engine, Iterable[PyTree]]:
    """Make this rank's engine, and its part of each batch of a loader of whole global batches.
    Collective.

    It is `build` and then `Engine.prepare`, whose arguments and errors it has.

    Returns:
        The engine, and an iterable of batches, whose tensors are (samples here, ...).
    """
    engine = build(model, plan, loss=loss, optimizer=optimizer, options=options, world=world)
    return engine, engine.prepare(loader)
