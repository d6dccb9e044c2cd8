"""A layer that computes a part of itself does not lose a caller's hooks in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.comm import World
from plait.errors import ModelError
from tests.helpers.threaded import threaded

HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": lambda one: one.register_forward_hook(lambda module, args, y: y * 2),
    "forward pre-hook": lambda one: one.register_forward_pre_hook(lambda module, args: None),
    "backward hook": lambda one: one.register_full_backward_hook(lambda module, into, out: None),
    "backward pre-hook": lambda one: one.register_full_backward_pre_hook(lambda module, out: None),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12)) for _ in range(2)]
    return nn.Sequential(*blocks).double()


def step(world: World, models: list[nn.Module], plan: str) -> float:
    engine = plait.build(
        models[world.rank],
        f"{plan} precision:float64",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    ones = torch.ones(4, 12, dtype=torch.float64)
    return engine.step((ones, ones), trace=False).loss


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_of_a_layer_in_parts_is_refused(kind: str) -> None:
    models = [net(), net()]
    for model in models:
        HOOKS[kind](model.get_submodule("0.2"))
    with pytest.raises(ModelError, match=rf"'0\.2' \(Linear\) has a {kind}, and tp2 .*take tp"):
        threaded(2, step, models, "tp2", plan="tp2")


PARAMETER_HOOKS: list[Callable[[nn.Parameter], Any]] = [
    lambda weight: weight.register_hook(lambda grad: grad / 2),
    lambda weight: weight.register_post_accumulate_grad_hook(lambda weight: None),
]


@pytest.mark.parametrize("hook", PARAMETER_HOOKS)
def test_a_hook_of_a_parameter_in_parts_is_refused(hook: Callable[[nn.Parameter], Any]) -> None:
    models = [net(), net()]
    for model in models:
        hook(model.get_parameter("0.2.weight"))
    with pytest.raises(ModelError, match=r"parameter '0\.2\.weight' has a hook, and tp2"):
        threaded(2, step, models, "tp2", plan="tp2")


def test_a_hook_around_layers_in_parts_stays() -> None:
    models = [net(), net(), net()]
    for model in models:
        model[1].register_forward_hook(lambda module, args, y: y * 2)
    alone = threaded(1, step, models[2:], "dp1", plan="dp1")
    assert threaded(2, step, models[:2], "tp2", plan="tp2") == pytest.approx(2 * alone, rel=1e-12)
