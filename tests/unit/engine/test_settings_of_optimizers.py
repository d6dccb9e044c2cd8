"""The settings of a caller's optimizer, and the marks of parameters, reach a rank's optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.comm import World
from plait.engine.optimizer_like import like
from plait.errors import OptimizerError
from plait.models.parameters import Parameters
from tests.helpers.threaded import threaded


class HandsOn(torch.optim.Adam):
    """Adam whose constructor names no setting, as those that packages derive."""

    def __init__(self, params: Iterable[nn.Parameter], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class Described(torch.optim.Optimizer):
    """Any settings, which no constructor names."""

    def __init__(self, params: Iterable[nn.Parameter], **settings: Any) -> None:
        super().__init__(params, {"lr": 1.0, "power": 1.0, **settings})


class OfGroups(torch.optim.SGD):
    """Groups alone have settings, and one without a rate gets one."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            group.setdefault("lr", 0.5)
        super().__init__(groups)


class FillsIn(torch.optim.Optimizer):
    """Groups alone have settings, which no base names either."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            group.setdefault("lr", 0.5)
            group.setdefault("momentum", 0.0)
        super().__init__(groups, {})


@pytest.mark.parametrize(
    ("kind", "of_groups", "settings"),
    [
        (HandsOn, False, {"lr": 0.25, "betas": (0.5, 0.75)}),
        (Described, False, {"lr": 0.25, "power": 3.0}),
        (OfGroups, True, {"lr": 0.25, "momentum": 0.5}),
        (FillsIn, True, {"lr": 0.25, "momentum": 0.5}),
    ],
)
def test_settings_that_a_constructor_does_not_name_are_kept(
    kind: Any, of_groups: bool, settings: dict[str, Any]
) -> None:
    model = nn.Linear(2, 1)
    given = list(model.parameters())
    optimizer = kind([{"params": given, **settings}]) if of_groups else kind(given, **settings)
    made = like(optimizer, model)(Parameters([("weight", nn.Parameter(torch.ones(1)))]))
    assert {key: made.param_groups[0][key] for key in settings} == settings


class Marked(nn.Module):
    """Two blocks, whose first weights have a rate of their own, as the state spaces of S4."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)
        )
        for block in self.blocks:
            block[0].weight._optim = {"lr": 0.01}
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.linspace(-0.3, 0.4, param.numel()).view_as(param))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def grouped(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    given = list(params)
    slow = [one for one in given if hasattr(one, "_optim")]
    rest = [one for one in given if not hasattr(one, "_optim")]
    groups = [{"params": rest}, {"params": slow, "lr": 0.01}]
    return torch.optim.SGD([one for one in groups if one["params"]], lr=0.1)


@pytest.mark.parametrize("plan", ["dp1", "dp2:zero3", "tp2", "pp2 mb2"])
@pytest.mark.parametrize("whole", [False, True])
def test_marks_of_parameters_reach_the_function_of_the_optimizer(plan: str, whole: bool) -> None:
    make = plait.WholeTensors(grouped) if whole else grouped

    def train(world: World) -> dict[str, list[float]]:
        text = f"{plan} precision:float64"
        engine = plait.build(Marked(), text, loss=F.mse_loss, optimizer=make, world=world)
        for own in engine.prepare([batch] * 2):
            engine.step(own)
        return {"losses": [engine.evaluate(own).real for own in engine.prepare([batch])]}

    values = torch.linspace(-1, 2, 16, dtype=torch.float64).view(4, 4)
    batch = values, values.flip(0)
    model = Marked().double()
    optimizer = grouped(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    alone = F.mse_loss(model(batch[0]), batch[1]).item()
    for rank in threaded(plait.Plan.parse(plan).world_size, train, plan=plan):
        assert rank["losses"] == pytest.approx([alone], rel=1e-12)


@pytest.mark.parametrize("plan", ["dp2:zero1", "tp2"])
def test_parameters_of_the_trial_have_the_marks_of_the_models(plan: str) -> None:
    """A function that read one without asking ended in an AttributeError of the trial."""

    def by_scale(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [one], "lr": one.scale / 10} for one in params], lr=1.0)

    def train(world: World) -> float:
        model = nn.Linear(4, 4)
        for number, param in enumerate(model.parameters()):
            param.scale = 1.0 + number
            nn.init.ones_(param)
        engine = plait.build(model, plan, loss=F.mse_loss, optimizer=by_scale, world=world)
        (own,) = engine.prepare([(torch.ones(2, 4), torch.ones(2, 4))])
        return engine.step(own).loss

    first, second = threaded(2, train, plan=plan)
    assert first == second


class Mixed(torch.optim.SGD):
    """Steps of one length for the tensors of some groups, and plain ones for the others."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                length = param.grad.norm() if group.get("equal") else 1.0
                param.data.sub_(param.grad / length, alpha=group["lr"])


def mixed(named: Iterable[tuple[str, nn.Parameter]]) -> Mixed:
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "equal": True}]
    for name, param in named:
        groups["1" in name]["params"].append(param)
    return Mixed(groups, lr=0.1)


@pytest.mark.parametrize("plan", ["dp2:zero1", "tp2"])
@pytest.mark.parametrize("is_given", [True, False])
def test_every_group_of_an_optimizer_is_tried(plan: str, is_given: bool) -> None:
    """Groups behind the first were not, so that ranks took the lengths of their parts."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    optimizer = (
        mixed(model.named_parameters()) if is_given else lambda params: mixed(params.named())
    )
    with pytest.raises(OptimizerError, match="Mixed is not elementwise"):
        plait.build(model, plan, loss=F.mse_loss, optimizer=optimizer)


def test_a_length_of_all_parameters_is_refused() -> None:
    """Each rank had the length of its parts."""

    class Together(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            params = [param for group in self.param_groups for param in group["params"]]
            length = torch.stack([param.grad.norm() for param in params]).norm()
            for param in params:
                param.data.sub_(param.grad / length, alpha=0.1)

    with pytest.raises(
        OptimizerError, match="Together updates a parameter by the gradients of others"
    ):
        plait.build(nn.Linear(4, 4), "dp2:zero1", loss=F.mse_loss, optimizer=Together)
