"""What `build` cannot use is refused in one sentence, before anything is made."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plait
from plait.comm import World
from plait.errors import ModelError, OptimizerError, PlaitError, PlanError
from tests.helpers.threaded import threaded


def scripted(module: nn.Module) -> nn.Module:
    """A module in TorchScript, without torch's warning that this is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.jit.script(module)
    return made


GIVEN: dict[str, Any] = {
    "model": nn.Linear(2, 1),
    "plan": "dp1",
    "loss": F.mse_loss,
    "optimizer": torch.optim.SGD,
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("model", nn.Linear, ModelError, "not the class Linear; make one, as Linear"),
        ("model", {"weight": 1}, ModelError, "a model is a torch.nn.Module, not dict"),
        (
            "model",
            nn.DataParallel(nn.Linear(2, 1)),
            ModelError,
            r"the model is wrapped in DataParallel, .* give what is inside it, its \.module",
        ),
        (
            "model",
            nn.Sequential(nn.Tanh(), nn.DataParallel(nn.Linear(2, 1))),
            ModelError,
            "module '1' is wrapped in DataParallel",
        ),
        (
            "model",
            scripted(nn.Linear(2, 1)),
            ModelError,
            r"the model is compiled to TorchScript, .* give the module that torch\.jit\.script",
        ),
        (
            "model",
            nn.Sequential(nn.Tanh(), scripted(nn.Linear(2, 1))),
            ModelError,
            "module '1' is compiled to TorchScript",
        ),
        ("plan", None, PlanError, "a plan is text such as 'dp2:zero3', not NoneType"),
        ("loss", "mse", ModelError, r"a function of \(output, targets\).* not str 'mse'"),
        ("optimizer", "adamw", OptimizerError, "a function of parameters .* not str 'adamw'"),
        ("optimizer", None, OptimizerError, "not NoneType None"),
    ],
)
def test_a_wrong_argument_is_named(
    name: str, value: object, error: type[PlaitError], words: str
) -> None:
    arguments = {**GIVEN, name: value}
    with pytest.raises(error, match=words):
        plait.build(arguments.pop("model"), arguments.pop("plan"), **arguments)


@pytest.mark.quick
def test_launch_needs_a_function() -> None:
    main: Any = "train"
    with pytest.raises(PlaitError, match=r"launch needs a function, .* not 'train'"):
        plait.launch(main, nproc=2)


@pytest.mark.parametrize(("plan", "other"), [("dp2", "pp2"), ("pp2", "dp2"), ("tp2", "dp2")])
def test_a_world_of_another_plan_is_refused(plan: str, other: str) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]

    def work(world: World) -> None:
        model = models[world.rank]
        plait.build(model, plan, loss=F.mse_loss, optimizer=torch.optim.SGD, world=world)

    match = f"'{plan}.*' has the axes {plan}, and the world .* was made for {other}; give build"
    with pytest.raises(plait.errors.WorldSizeError, match=match):
        threaded(2, work, plan=other)
