"""A `GradScaler` in a loss is refused: no engine divides its gradients by the scale again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

import plait
from plait.comm import World
from plait.engine.loss import LossFunction
from plait.errors import ModelError
from tests.helpers.threaded import threaded

BATCH = torch.ones(4, 6), torch.zeros(4, 6)
MODEL = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
PLANS = ("dp1", "dp2", "dp2:zero1", "dp2:zero3", "tp2", "pp2 mb2", "mb2")


def step(world: World, plan: str, loss: LossFunction) -> float:
    adam = torch.optim.AdamW
    engine = plait.build(deepcopy(MODEL), plan, loss=loss, optimizer=adam, world=world)
    (batch,) = engine.prepare([BATCH])
    return engine.step(batch, trace=False).loss


def run(plan: str, loss: LossFunction) -> float:
    losses: list[float] = threaded(plait.Plan.parse(plan).world_size, step, plan, loss, plan=plan)
    return losses[0]


class Trainer:
    """A scaler in an attribute."""

    def __init__(self) -> None:
        self.scaler = GradScaler("cpu", init_scale=1024.0)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.scaler.scale(F.mse_loss(output, targets)) / 2


def in_a_closure() -> LossFunction:
    scaler = GradScaler("cpu", init_scale=1024.0)
    return lambda output, targets: scaler.scale(F.mse_loss(output, targets))


def with_a_count() -> LossFunction:
    scaler = GradScaler("cpu", init_scale=1024.0)

    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total = F.mse_loss(output, targets, reduction="sum")
        return scaler.scale(total), torch.tensor(float(targets.numel()))

    return loss


@pytest.mark.parametrize("plan", PLANS)
def test_a_scaler_is_refused_on_every_rank(plan: str) -> None:
    with pytest.raises(ModelError, match="a GradScaler multiplies the loss by 1024") as raised:
        run(plan, in_a_closure())
    assert "precision:bf16 in the plan or options=plait.Options(float16=True)" in str(raised.value)


@pytest.mark.parametrize("make", [lambda: Trainer().loss, with_a_count])
def test_a_scaler_is_found_wherever_it_is_kept(make: Callable[[], LossFunction]) -> None:
    with pytest.raises(ModelError, match="a GradScaler multiplies the loss"):
        run("dp1", make())


def factor(value: Tensor | float) -> LossFunction:
    return lambda output, targets: F.mse_loss(output, targets) * value


@pytest.mark.parametrize(
    "value", [3.0, torch.tensor(65536.0), nn.Parameter(torch.tensor(0.5))], ids=str
)
def test_other_factors_are_none_of_a_scaler(value: Tensor | float) -> None:
    kept = GradScaler("cpu")
    kept.scale(torch.ones(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss reads 1 trainable parameters")
        assert run("dp1", factor(value)) > 0


def test_a_scaler_that_is_switched_off_is_let_be() -> None:
    scaler = GradScaler("cpu", enabled=False)
    assert run("dp1", lambda o, t: scaler.scale(F.mse_loss(o, t))) > 0
