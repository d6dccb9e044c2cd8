"""A model whose layers are split is neither copied by one rank nor split once more."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.comm import World
from plait.errors import ModelError
from tests.helpers.threaded import threaded


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))


def build(world: World, model: nn.Module, plan: str) -> plait.Engine:
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    options = plait.Options(cutting=plait.Cutting(example=torch.ones(1, 12)))
    return plait.build(model, plan, loss=F.mse_loss, optimizer=sgd, options=options, world=world)


def state(world: World, models: list[nn.Module], plan: str) -> list[str]:
    model = models[world.rank]
    build(world, model, plan)
    names = list(model.state_dict(keep_vars=True))
    return names if plan == "dp2" else list(model.state_dict())


def second(world: World, models: list[nn.Module], first: str, plan: str) -> None:
    build(world, models[world.rank], first)
    build(world, models[world.rank], plan)


def made(count: int) -> list[nn.Module]:
    return [net() for _ in range(count)]


@pytest.mark.parametrize("plan", ["tp2", "tp4:2d", "dp2:zero1 tp2"])
def test_a_state_dict_of_parts_is_refused(plan: str) -> None:
    size = plait.Plan.parse(plan).world_size
    match = r"'.*tp.*' has split its layers, .* engine\.save_pretrained\(path\) write all"
    with pytest.raises(ModelError, match=match):
        threaded(size, state, made(size), plan, plan=plan)


def test_a_state_dict_of_whole_layers_is_none_of_its_business() -> None:
    assert len(threaded(2, state, made(2), "dp2", plan="dp2")[0]) == 4


@pytest.mark.parametrize("first", ["tp2", "tp2 mb2"])
def test_a_second_engine_of_parts_is_refused(first: str) -> None:
    match = rf"were split by an engine that was built of it before \('{first}'\), .* engine\.load"
    for plan in ("tp2", "dp2"):
        with pytest.raises(ModelError, match=match):
            threaded(2, second, made(2), first, plan, plan=first)


def test_a_second_engine_of_whole_layers_is_made() -> None:
    threaded(2, second, made(2), "dp2", "dp2:zero1", plan="dp2")
