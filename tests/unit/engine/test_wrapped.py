"""What a script wraps around a model, or calls on it, ends in one sentence with the cure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import plait
from plait.comm import World
from plait.errors import ModelError
from plait.outer import Change
from tests.helpers.threaded import threaded


def filled(*modules: nn.Module) -> nn.Sequential:
    """Equal values on all ranks, which share one generator as threads."""
    model = nn.Sequential(*modules)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param))
    return model


def net() -> nn.Sequential:
    return filled(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def built(model: nn.Module, plan: str, world: World) -> plait.Engine:
    options = plait.Options(cutting=plait.Cutting(example=torch.zeros(1, 4)))
    return plait.build(
        model, plan, loss=F.cross_entropy, optimizer=sgd, world=world, options=options
    )


def loaded(world: World, plan: str) -> str:
    model = net()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    built(model, plan, world)
    with pytest.raises(ModelError) as caught:
        model.load_state_dict(state)
    return str(caught.value)


@pytest.mark.parametrize("plan", ["dp2:zero3", "tp2", "pp2 mb2"])
def test_a_load_into_parts_is_refused_in_one_sentence(plan: str) -> None:
    for said in threaded(2, loaded, plan, plan=plan):
        assert said.count("before plait.build") == 1
        assert "engine.load(path)" in said


def loaded_whole(world: World, plan: str) -> bool:
    model = net()
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    built(model, plan, world)
    model.load_state_dict(state)
    return all(bool((param == 1).all()) for param in model.parameters())


def test_a_load_into_whole_parameters_works() -> None:
    assert threaded(2, loaded_whole, "dp2", plan="dp2") == [True, True]


def copied(world: World) -> None:
    model = net()
    built(model, "tp2", world)
    with pytest.raises(ModelError, match=r"plait\.AveragedWeights"):
        copy.deepcopy(model)


def test_a_copy_of_parts_names_the_average_of_weights() -> None:
    threaded(2, copied, plan="tp2")


def test_a_factor_of_one_update_leaves_the_rates_of_a_scheduler() -> None:
    model = nn.Linear(1, 1, bias=False)
    engine = plait.build(model, "dp1", loss=F.mse_loss, optimizer=sgd)
    optimizer = engine.update.optimizer
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    moved = []
    for factor in (0.5, 1.0, 0.25):
        param = optimizer.param_groups[0]["params"][0]
        param.grad = torch.ones_like(param)
        before = param.detach().clone()
        engine.update.make(Change(0, 1.0, factor))
        moved.append(float((before - param.detach()).sum()))
        scheduler.step()
    assert moved == pytest.approx([0.1 * 0.5, 0.05 * 1.0, 0.025 * 0.25], rel=1e-4)
