"""The warnings of a short training."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.comm import World
from tests.helpers.threaded import threaded


def warnings_of_steps(
    model: nn.Module, plan: str, shapes: tuple[int, int], ranks: int = 1
) -> list[str]:
    """The warnings of three steps of 8 samples, [8, shapes[0]] to [8, shapes[1]], of all ranks."""
    features, outputs = shapes

    def train(world: World) -> None:
        draw = torch.Generator().manual_seed(5)
        batches = [
            (torch.randn(8, features, generator=draw), torch.zeros(8, outputs)) for _ in range(3)
        ]
        engine = plait.build(
            copy.deepcopy(model),
            plan,
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            world=world,
        )
        for batch in engine.prepare(batches):
            engine.step(batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threaded(ranks, train, plan=plan)
    return [str(one.message) for one in caught]
