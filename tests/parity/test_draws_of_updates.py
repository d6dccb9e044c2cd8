"""An optimizer that draws noise, and functions that take parameters by their place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import build
from tests.parity.few_steps import STEPS, batch, drawn

WIDTH = 6
Run = Callable[..., list[Any]]


class Noisy(torch.optim.Optimizer):
    """Stochastic gradient Langevin dynamics: SGD whose steps have noise (Welling & Teh 2011)."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * (param.grad + torch.randn_like(param)))


def falling(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Rates that fall from layer to layer, as fine-tuning has them."""
    own = list(params)
    groups = [{"params": [one], "lr": 0.2 * 0.5**place} for place, one in enumerate(own)]
    return torch.optim.SGD(groups)


def model() -> nn.Module:
    return drawn(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)))


def trained(world: World, plan: str, make: Callable[..., torch.optim.Optimizer]) -> list[Any]:
    network = model()
    engine = build(
        network, f"{plan} precision:float64", loss=F.mse_loss, optimizer=make, world=world
    )
    data = world.axis("dp")
    for _ in range(STEPS):
        engine.step([part.tensor_split(data.size)[data.rank] for part in batch(WIDTH)])
    return [param.detach().clone() for param in network.parameters()]


@pytest.mark.parametrize("plan", ["dp2", "dp2:ring", "dp2 mb2"])
def test_noise_of_an_update_is_the_same_on_all_data_ranks(ranks: Run, plan: str) -> None:
    (alone,) = ranks(1, trained, "dp1", Noisy, plan="dp1")
    one, other = ranks(2, trained, plan, Noisy, plan=plan)
    for first, second, whole in zip(one, other, alone, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, whole, rtol=1e-12, atol=1e-12)


def test_steps_have_other_noise() -> None:
    network = nn.Linear(1, 1)
    engine = build(network, "dp1", loss=lambda output, _: 0 * output.mean(), optimizer=Noisy)
    weights = [float(network.weight.detach())]
    for _ in range(STEPS):
        engine.step((torch.zeros(1, 1), torch.zeros(1, 1)))
        weights.append(float(network.weight.detach()))
    steps = {round(after - before, 5) for before, after in itertools.pairwise(weights)}
    assert len(steps) == STEPS


@pytest.mark.parametrize("plan", ["dp1", "dp2"])
def test_parameters_come_in_the_models_order(ranks: Run, plan: str) -> None:
    plainly = model()
    update = falling(plainly.parameters())
    inputs, targets = batch(WIDTH)
    for _ in range(STEPS):
        update.zero_grad()
        F.mse_loss(plainly(inputs), targets).backward()
        update.step()
    results = ranks(2 if "2" in plan else 1, trained, plan, falling, plan=plan)
    for found in results:
        for one, other in zip(found, plainly.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12)
