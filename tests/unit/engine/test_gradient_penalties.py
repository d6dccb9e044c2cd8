"""A loss that takes a gradient itself equals that of one device, or is refused with the cure."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.errors import ModelError
from tests.helpers.threaded import threaded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(hidden).tanh())
        return down


class Critic(nn.Module):
    """A critic that gives its loss the place at which to take a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        place = inputs.detach().requires_grad_()
        hidden = place
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden), place


def penalty(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    scores, place = output
    (slope,) = torch.autograd.grad(scores.sum(), place, create_graph=True)
    return F.mse_loss(scores, targets) + (slope.norm(dim=1) - 1).square().mean()


def critic() -> Critic:
    torch.manual_seed(0)
    return Critic().double()


def losses(world: World, models: list[Critic], plan: str) -> list[float]:
    model = models[world.rank]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = plait.build(model, plan, loss=penalty, optimizer=sgd, world=world)
    draws = torch.Generator().manual_seed(1)
    batch = torch.randn(4, 8, generator=draws), torch.randn(4, 1, generator=draws)
    whole = tuple(part.double() for part in batch)
    return [engine.step(part, trace=False).loss for part in engine.prepare([whole] * 3)]


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero3 mb2"])
def test_a_gradient_penalty_equals_one_device(plan: str) -> None:
    plan, alone = f"{plan} precision:float64", "dp1 precision:float64"
    whole = threaded(1, losses, [critic()], alone, plan=alone)[0]
    assert threaded(2, losses, [critic(), critic()], plan, plan=plan)[0] == pytest.approx(
        whole, rel=1e-12
    )


@pytest.mark.parametrize(
    ("plan", "cure"),
    [("pp2 mb2", "take pp out of the plan"), ("tp2", "take tp out of the plan")],
)
def test_a_gradient_penalty_is_refused_where_its_graph_is_divided(plan: str, cure: str) -> None:
    plan = f"{plan} precision:float64"
    with pytest.raises(ModelError, match=cure):
        threaded(2, losses, [critic(), critic()], plan, plan=plan)


def residual(output: Tensor, places: Tensor) -> Tensor:
    """The square of u'' + u, as a loss of differential equations has it."""
    (slope,) = torch.autograd.grad(output.sum(), places, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), places, create_graph=True)
    return (bend + output).square().mean()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def residuals(world: World, models: list[nn.Sequential], plan: str) -> list[float]:
    model = models[world.rank]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = plait.build(model, plan, loss=residual, optimizer=sgd, world=world)
    places = torch.linspace(0, 1, 8).unsqueeze(1).requires_grad_()
    batches = [(places, places)] * 3
    return [engine.step(batch, trace=False).loss for batch in engine.prepare(batches)]


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero3 mb2", "mb2"])
def test_a_loss_takes_derivatives_by_inputs_that_are_its_targets(plan: str) -> None:
    plan, alone = f"{plan} precision:float64", "dp1 precision:float64"
    whole = threaded(1, residuals, [net()], alone, plan=alone)[0]
    size = plait.Plan.parse(plan).world_size
    models = [net() for _ in range(size)]
    assert threaded(size, residuals, models, plan, plan=plan)[0] == pytest.approx(whole, rel=1e-12)
