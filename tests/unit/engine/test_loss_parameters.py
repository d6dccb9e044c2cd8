"""Parameters that a loss has, and the model has not, are told of; an optimizer of them is
refused.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.engine.loss import LossFunction
from plait.errors import OptimizerError
from tests.helpers.threaded import threaded

BATCH = torch.ones(4, 6), torch.zeros(4, 6)
PLANS = ("dp1", "dp2", "dp2:zero1", "dp2:zero3", "tp2", "pp2 mb2", "mb2")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


class Scaled(nn.Module):
    """A loss with a scale that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(output * self.scale, targets)


def step(world: World, plan: str, loss: LossFunction) -> None:
    sgd = torch.optim.SGD
    engine = plait.build(net(), plan, loss=loss, optimizer=sgd, world=world)
    for batch in engine.prepare([BATCH, BATCH]):
        engine.step(batch, trace=False)


def said(plan: str, loss: LossFunction) -> list[str]:
    """The warnings of two steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threaded(plait.Plan.parse(plan).world_size, step, plan, loss, plan=plan)
    return [str(one.message) for one in caught if "the loss reads" in str(one.message)]


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_of_a_loss_are_told_once(plan: str) -> None:
    (text,) = said(plan, Scaled())
    assert "1 trainable parameters that the model does not have" in text
    assert "shape [6], and no engine trains them" in text


def test_parameters_of_a_loss_that_a_function_calls() -> None:
    scaled = Scaled()

    def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return scaled(output, targets) * len(output), torch.tensor(float(len(output)))

    assert len(said("dp2", counted)) == 1


@pytest.mark.parametrize("plan", PLANS)
def test_frozen_parameters_and_those_without_a_gradient(plan: str) -> None:
    frozen, teacher = Scaled().requires_grad_(False), Scaled()

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            taught = teacher(output, targets)
        found: Tensor = frozen(output, targets) + taught
        return found

    assert said(plan, loss) == []


@pytest.mark.parametrize("plan", ["dp1", "dp2", "dp2:zero3", "mb2"])
def test_a_penalty_on_the_models_own_parameters(plan: str) -> None:
    def penalised(world: World) -> None:
        model = net()

        def loss(output: Tensor, targets: Tensor) -> Tensor:
            weights = [param.square().mean() for param in model.parameters()]
            return F.mse_loss(output, targets) + torch.stack(weights).sum()

        engine = plait.build(model, plan, loss=loss, optimizer=torch.optim.SGD, world=world)
        for batch in engine.prepare([BATCH]):
            engine.step(batch, trace=False)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threaded(plait.Plan.parse(plan).world_size, penalised, plan=plan)
    assert not [one for one in caught if "the loss reads" in str(one.message)]


def test_a_critic_of_another_engine_says_nothing() -> None:
    def adversarial(world: World) -> None:
        critic, sgd = net(), torch.optim.SGD
        teaching = plait.build(critic, "dp1", loss=F.mse_loss, optimizer=sgd, world=world)

        def fooled(output: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(critic(output), targets)

        engine = plait.build(net(), "dp1", loss=fooled, optimizer=sgd, world=world)
        engine.step(BATCH, trace=False)
        teaching.step(BATCH, trace=False)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threaded(1, adversarial, plan="dp1")
    assert not [one for one in caught if "the loss reads" in str(one.message)]


def test_an_optimizer_of_the_parameters_of_a_loss() -> None:
    model, loss = net(), Scaled()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    match = r"the SGD has 1 parameters that the Sequential does not have, such as .* \[6\]"
    with pytest.raises(OptimizerError, match=match):
        plait.build(model, "dp1", loss=loss, optimizer=optimizer)


class Around(torch.optim.Optimizer):
    """A wrapper of another optimizer."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})


def test_an_optimizer_that_wraps_another() -> None:
    model = net()
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    match = r"the Around cannot be made again .* AttributeError: .*optimizer=lambda params"
    with pytest.raises(OptimizerError, match=match):
        plait.build(model, "dp1", loss=F.mse_loss, optimizer=optimizer)
