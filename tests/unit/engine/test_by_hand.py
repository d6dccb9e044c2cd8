"""A step of the optimizer by hand, which no gradient of `loss.backward()` reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.errors import OptimizerError
from plait.plan import Plan
from plait.torch_internals import has_own_step
from tests.helpers.threaded import threaded

PLANS = ("dp1", "dp1 precision:bf16", "dp2", "dp2:zero3")


def net() -> nn.Module:
    """Values by index, as ranks that are threads share one generator."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param))
    return model


def batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(-1, 1, 8).view(4, 2)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def by_hand(world: World, plan: str) -> None:
    """Steps by hand, before and after those of the engine."""
    engine = plait.build(net(), plan, loss=F.mse_loss, optimizer=sgd, world=world)
    for _ in range(2):
        with pytest.raises(
            OptimizerError, match=r"SGD was made by hand.*call engine.step\(batch\)"
        ):
            engine.update.optimizer.step()
        engine.step(batch(), trace=False)


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_by_hand_is_refused(plan: str) -> None:
    threaded(Plan.parse(plan).world_size, by_hand, plan, plan=plan)


def is_fast(world: World) -> bool:
    engine = plait.build(net(), "dp1", loss=F.mse_loss, optimizer=sgd, world=world)
    return has_own_step(engine.update.optimizer)


def test_the_guard_leaves_the_steps_of_the_engine_fast() -> None:
    assert threaded(1, is_fast, plan="dp1") == [True]
