"""What a caller changes by hand after a build, and would move nothing, is refused by a sentence."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.comm import World
from plait.errors import ModelError, OptimizerError
from tests.helpers.threaded import threaded

PLANS = ("dp1", "dp2:zero1", "dp2:zero3", "tp2", "pp2 mb2")
BATCH = torch.ones(4, 12), torch.zeros(4, 12)

Change = Callable[[nn.Module, torch.optim.Optimizer], object]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 12))


def steps(world: World, models: list[nn.Module], plan: str, change: Change) -> None:
    """A step, a change, and a step."""
    model = models[world.rank]
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    engine = plait.build(model, plan, loss=F.mse_loss, optimizer=optimizer, world=world)
    for batch in engine.prepare([BATCH, BATCH]):
        engine.step(batch, trace=False)
        change(model, optimizer)


def refused(plan: str, change: Change, match: str, *, frozen: bool = False) -> None:
    size = plait.Plan.parse(plan).world_size
    models: list[nn.Module] = [net() for _ in range(size)]
    for model in models:
        model.get_submodule("0").requires_grad_(not frozen)
    error = ModelError if re.search("parameter|module", match) else OptimizerError
    with pytest.raises(error, match=match):
        threaded(size, steps, models, plan, change, plan=plan)


@pytest.mark.parametrize("plan", ["dp2:zero1", "dp2:zero3", "dp2:ring", "pp2 mb2"])
def test_a_parameter_that_is_frozen_between_steps(plan: str) -> None:
    match = r"the parameter '0\.weight' is frozen now and was trained .* call engine\.save"
    refused(plan, lambda model, _: model.get_submodule("0").requires_grad_(False), match)


@pytest.mark.parametrize("plan", PLANS)
def test_a_parameter_that_is_set_free_between_steps(plan: str) -> None:
    match = r"the parameter '0\.weight' is trained now and was frozen"
    change: Change = lambda model, _: model.get_submodule("0").requires_grad_(True)  # noqa: E731
    refused(plan, change, match, frozen=True)


@pytest.mark.parametrize("plan", ["dp1", "dp2:zero3"])
def test_a_rate_that_is_changed_in_the_callers_optimizer(plan: str) -> None:
    def change(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.01

    refused(plan, change, r"lr = 0\.01 in group 0, and had 0\.1 .*Options\(learning_rate=")


def test_a_schedule_that_the_callers_optimizer_gets_after_the_build() -> None:
    def change(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)

    refused("dp1", change, r"the SGD has a schedule .*Options\(learning_rate=")


def test_a_hook_that_the_callers_optimizer_gets_after_the_build() -> None:
    def change(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: None)

    refused("dp1", change, r"the SGD has a hook of its steps, .* engine\.update\.optimizer")


def test_a_hook_that_the_callers_optimizer_has() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(OptimizerError, match="the SGD has a hook of its steps, and an engine"):
        plait.build(model, "dp1", loss=F.mse_loss, optimizer=optimizer)


@pytest.mark.parametrize("first", [True, False])
def test_the_cure_takes_a_changed_model_on(first: bool, tmp_path: Path) -> None:
    def run(world: World) -> bool:
        values = []
        for trains in (first, not first):
            model = net()
            model[0].requires_grad_(trains)
            engine = plait.build(
                model,
                "dp1",
                loss=F.mse_loss,
                optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
                world=world,
            )
            if values:
                engine.load(tmp_path / "saved")
            else:
                engine.step(BATCH, trace=False)
                engine.save(tmp_path / "saved")
            values.append([one.values.clone() for one in engine.local_parameters()])
        engine.step(BATCH, trace=False)
        return all(torch.equal(one, other) for one, other in zip(*values, strict=True))

    assert threaded(1, run) == [True]


def losses(world: World, models: list[nn.Module], plan: str) -> list[float]:
    """Six steps of AdamW; the first layer is frozen after three."""
    model = models[world.rank].double()
    adamw = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
    engine = plait.build(model, plan, loss=F.mse_loss, optimizer=adamw, world=world)
    found = []
    for batch in engine.prepare([(BATCH[0].double(), BATCH[1].double())] * 6):
        if len(found) == 3:
            model.get_submodule("0").requires_grad_(False)
        found.append(engine.step(batch, trace=False).loss)
    return found


@pytest.mark.parametrize("plan", ["dp1", "dp2", "dp2 mb2", "tp2"])
def test_a_parameter_may_be_frozen_where_each_is_updated_by_itself(plan: str) -> None:
    model = net().double()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    expected = []
    for step in range(6):
        model[0].requires_grad_(step < 3)
        adamw.zero_grad()
        loss = F.mse_loss(model(BATCH[0].double()), BATCH[1].double())
        loss.backward()
        adamw.step()
        expected.append(loss.item())
    size = plait.Plan.parse(plan).world_size
    text = f"{plan} precision:float64"
    found = threaded(size, losses, [net() for _ in range(size)], text, plan=text)[0]
    assert found == pytest.approx(expected, rel=1e-12)


def replace_weight(model: nn.Module, _: object) -> None:
    weight = torch.zeros_like(model.get_parameter("0.weight"))
    model.get_submodule("0").register_parameter("weight", nn.Parameter(weight))


def replace_layer(model: nn.Module, _: object) -> None:
    model.add_module("2", nn.Linear(12, 12))


def give_memory(model: nn.Module, _: object) -> None:
    for param in model.parameters():
        param.data = torch.zeros(param.shape)


def load(model: nn.Module, _: object) -> None:
    model.load_state_dict(net().state_dict())


@pytest.mark.parametrize("plan", PLANS)
def test_a_parameter_that_is_put_in_the_place_of_another(plan: str) -> None:
    match = r"the parameter '0\.weight' is another one now .* never be trained or saved"
    refused(plan, replace_weight, match)


@pytest.mark.parametrize("plan", PLANS)
def test_a_module_that_is_put_in_the_place_of_another(plan: str) -> None:
    match = r"the module '2' was not in the model when .* never be trained or saved; call"
    refused(plan, replace_layer, match)


@pytest.mark.parametrize("plan", ["dp1", "dp2", "dp2:zero1", "dp2:zero2", "tp2", "pp2 mb2"])
def test_a_parameter_that_is_given_other_memory(plan: str) -> None:
    match = r"the parameter '\d\.weight' has other memory now .* param\.copy_\(values\)"
    refused(plan, give_memory, match)


@pytest.mark.parametrize(
    "plan", ["dp1 precision:bf16", "dp2 precision:bf16", "dp2:zero1 precision:bf16"]
)
def test_numbers_that_the_next_update_would_undo(plan: str) -> None:
    match = r"the parameter '0\.weight' was written .* masters apart from .* engine\.load"
    refused(plan, load, match)


@pytest.mark.parametrize("plan", ["dp1", "dp2", "dp2:zero1", "dp2:zero2"])
def test_numbers_that_are_written_into_the_memory_that_is_trained(plan: str) -> None:
    size = plait.Plan.parse(plan).world_size
    threaded(size, steps, [net() for _ in range(size)], plan, load, plan=plan)


def test_memory_that_is_lent_between_two_steps_and_given_back() -> None:
    def lend(model: nn.Module, _: object) -> None:
        for param in model.parameters():
            own = param.data
            param.data = torch.zeros(param.shape)
            param.data = own

    threaded(1, steps, [net()], "dp1", lend)


def test_a_wrapper_of_a_layer_that_was_there_before() -> None:
    def wrap(model: nn.Module, _: object) -> None:
        model.add_module("2", nn.Sequential(model.get_submodule("2")))

    threaded(1, steps, [net()], "dp1", wrap)


def test_numbers_that_the_engine_loads(tmp_path: Path) -> None:
    engine = plait.build(net(), "dp1 precision:bf16", loss=F.mse_loss, optimizer=torch.optim.SGD)
    engine.step(BATCH)
    engine.save(tmp_path)
    engine.load(tmp_path)
    engine.step(BATCH)


def alternating(world: World, models: list[list[nn.Module]], *, copies: bool) -> list[float]:
    """Losses of two engines in turn, the second of which has the first one's model, frozen."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    maker, judge = models[world.rank]
    judged = copy.deepcopy(judge) if copies else judge
    first = plait.build(judge, "dp2", loss=F.mse_loss, optimizer=sgd, world=world)
    both = nn.Sequential(maker, judged.requires_grad_(False))
    second = plait.build(both, "dp2", loss=F.mse_loss, optimizer=sgd, world=world)
    losses = []
    for _ in range(2):
        losses.append(first.step(BATCH, trace=False).loss)
        with torch.no_grad():
            for param, values in zip(judged.parameters(), judge.parameters(), strict=True):
                param.copy_(values)
        losses.append(second.step(BATCH, trace=False).loss)
    return losses


def pairs() -> list[list[nn.Module]]:
    """A layer and a model for each of two ranks."""
    return [[net()[0], net()] for _ in range(2)]


def test_a_second_engine_of_a_part_of_the_model() -> None:
    match = r"another engine was built of the parameter '0\.weight' after this .* copy\.deepcopy"
    with pytest.raises(ModelError, match=match):
        threaded(2, partial(alternating, copies=False), pairs(), plan="dp2")


def test_a_second_engine_of_a_copy_gets_the_numbers_of_the_first() -> None:
    judge = net()
    both = nn.Sequential(net()[0], copy.deepcopy(judge))
    expected = []
    for _ in range(2):
        for model, trained in ((judge, judge), (both, both[0])):
            both[1].load_state_dict(judge.state_dict())
            loss = F.mse_loss(model(BATCH[0]), BATCH[1])
            expected.append(loss.item())
            model.zero_grad()
            loss.backward()
            torch.optim.SGD(trained.parameters(), lr=0.1).step()
    for found in threaded(2, partial(alternating, copies=True), pairs(), plan="dp2"):
        assert found == pytest.approx(expected, rel=1e-5)
