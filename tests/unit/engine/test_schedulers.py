"""A scheduler on the optimizer of an engine goes on after a load, as after torch's
`load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import plait
from plait.checkpoint import Checkpoint
from plait.comm import World
from plait.plan import Plan
from tests.helpers.threaded import threaded

PLANS = ("dp1", "dp2", "dp2:zero1", "dp2:zero3", "tp2", "pp2 mb2")
STEPS = 6

MakeScheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, MakeScheduler] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
}


def net(world: World | None = None) -> nn.Sequential:
    """Values by index, as ranks that are threads share one generator."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            count = param.numel()
            param.copy_(torch.linspace(-1, 1 + index, count, dtype=param.dtype).view_as(param))
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(STEPS, 2, 4, 4, generator=generator, dtype=torch.float64)
    return [(one[0], one[1]) for one in values]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def plain(make: MakeScheduler) -> list[float]:
    model, losses = net(), []
    optimizer = sgd(model.parameters())
    scheduler = make(optimizer)
    for inputs, targets in batches():
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def resumed(
    world: World, plan: str, make: MakeScheduler, folder: Path, options: plait.Options | None
) -> list[float]:
    """The losses of steps, with another engine from the third on."""

    def build() -> tuple[plait.Engine, Any, list[Any]]:
        text = f"{plan} precision:float64"
        engine = plait.build(
            net(), text, loss=F.mse_loss, optimizer=sgd, world=world, options=options
        )
        own = list(engine.prepare(batches()))
        return engine, make(engine.update.optimizer), own

    engine, scheduler, own = build()
    losses = []
    for index, batch in enumerate(own):
        if index == 3:
            engine.save(folder)
            told = scheduler.state_dict()
            engine, scheduler, _ = build()
            engine.load(folder)
            scheduler.load_state_dict(told)
        losses.append(engine.step(batch, trace=False).loss)
        scheduler.step()
    return losses


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_scheduler_goes_on_after_a_load(plan: str, kind: str, tmp_path: Path) -> None:
    make = SCHEDULERS[kind]
    size = Plan.parse(plan).world_size
    found = threaded(size, resumed, plan, make, tmp_path / "saved", None, plan=plan)[0]
    assert found == pytest.approx(plain(make), rel=1e-10)


def one_step(
    world: World, plan: str, folder: Path, index: int, state: dict[str, Any]
) -> tuple[float, dict[str, Any], list[dict[str, Any]]]:
    """One step of an engine that goes on from a checkpoint, where there is one."""
    text = f"{plan} precision:float64"
    engine = plait.build(net(), text, loss=F.mse_loss, optimizer=sgd, world=world)
    batch = list(engine.prepare(batches()))[index]
    scheduler = SCHEDULERS["OneCycleLR"](engine.update.optimizer)
    if index:
        engine.load(folder / str(index))
        scheduler.load_state_dict(state)
    loss = engine.step(batch, trace=False).loss
    scheduler.step()
    engine.save(folder / str(index + 1))
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in engine.update.optimizer.param_groups
    ]
    return loss, scheduler.state_dict(), groups


def test_a_scheduler_goes_on_under_other_plans(tmp_path: Path) -> None:
    """Rates and momentum, which the scheduler changes both, go from plan to plan."""
    losses: list[float] = []
    state: dict[str, Any] = {}
    for index, plan in enumerate(("dp2", "dp2:zero3", "tp2", "pp2 mb2", "dp1")):
        size = Plan.parse(plan).world_size
        told = threaded(size, one_step, plan, tmp_path, index, state, plan=plan)
        assert all(groups == told[0][2] for _, _, groups in told)
        losses.append(told[0][0])
        state = told[0][1]
    assert losses == pytest.approx(plain(SCHEDULERS["OneCycleLR"])[:5], rel=1e-10)


def engine_with(rate: float, **settings: Any) -> plait.Engine:
    return plait.build(
        net(),
        "dp1 precision:float64",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=rate),
        options=plait.Options(**settings),
    )


def rate_after_a_load(first: plait.Engine, second: plait.Engine, folder: Path) -> float:
    first.step(batches()[0])
    first.save(folder)
    second.load(folder)
    second.step(batches()[0])
    return float(second.update.optimizer.param_groups[0]["lr"])


def test_a_rate_that_no_scheduler_has_changed_is_that_of_the_new_build(tmp_path: Path) -> None:
    assert rate_after_a_load(engine_with(0.1), engine_with(0.2), tmp_path) == 0.2


def test_a_schedule_of_the_engine_is_that_of_the_new_build(tmp_path: Path) -> None:
    halves, thirds = (engine_with(0.3, learning_rate=lambda step, by=by: 1 / by) for by in (2, 3))
    assert rate_after_a_load(halves, thirds, tmp_path) == pytest.approx(0.1)


def test_a_rate_that_was_changed_before_an_earlier_state_is_loaded(tmp_path: Path) -> None:
    engine = engine_with(0.1)
    engine.save(tmp_path)
    engine.update.optimizer.param_groups[0]["lr"] = 0.01
    engine.load(tmp_path)
    assert engine.update.optimizer.param_groups[0]["lr"] == 0.1


def test_a_scheduler_that_was_made_after_the_save_begins_at_its_first_rate(tmp_path: Path) -> None:
    engine_with(0.1).save(tmp_path)
    engine = engine_with(0.1)
    scheduler = lr_scheduler.LambdaLR(engine.update.optimizer, lambda step: (step + 1) / 10)
    engine.load(tmp_path)
    assert engine.update.optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


def test_a_rate_in_a_tensor_is_set_in_its_place(tmp_path: Path) -> None:
    def build() -> plait.Engine:
        return plait.build(
            net(),
            "dp1 precision:float64",
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(
                params, lr=torch.tensor(0.5), foreach=False, momentum=0.5
            ),
        )

    engine = build()
    scheduler = lr_scheduler.ExponentialLR(engine.update.optimizer, 0.5)
    engine.step(batches()[0])
    scheduler.step()
    engine.save(tmp_path)
    other = build()
    rate = other.update.optimizer.param_groups[0]["lr"]
    other.load(tmp_path)
    assert other.update.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_a_checkpoint_without_a_scheduler_has_no_settings(tmp_path: Path) -> None:
    for engine in (engine_with(0.1), engine_with(0.1, learning_rate=lambda step: 1 / (step + 2))):
        engine.step(batches()[0])
        engine.save(tmp_path / "saved")
        names = Checkpoint.open(tmp_path / "saved").names()
        assert not [name for name in names if "group." in name]


@pytest.mark.filterwarnings("error:Detected call of")  # the first update comes after the scheduler
@pytest.mark.parametrize("plan", ["pp2:pipedream mb2", "pp2:2bw mb2", "pp2:pipedream mb1"])
def test_a_late_update_has_the_rate_of_its_own_step(plan: str) -> None:
    """A scheduler goes on before the last gradients of a step have come."""

    def factor(step: int) -> float:
        return 1 / (1 + step)

    def train(world: World, options: plait.Options, schedules: bool) -> dict[str, Tensor]:
        text = f"{plan} precision:float64"
        engine = plait.build(
            net(), text, loss=F.mse_loss, optimizer=sgd, options=options, world=world
        )
        optimizer = engine.update.optimizer
        scheduler = lr_scheduler.LambdaLR(optimizer, factor) if schedules else None
        for batch in batches():
            engine.step(batch)
            if scheduler is not None:
                scheduler.step()
        engine.flush()
        return {part.name: part.values.clone() for part in engine.local_parameters()}

    told = threaded(2, train, plait.Options(learning_rate=factor), False, plan=plan)
    own = threaded(2, train, plait.Options(), True, plan=plan)
    for expected, found in zip(told, own, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plan", ["pp2:pipedream mb1", "pp2:2bw mb2"])
def test_a_late_update_has_the_weight_decay_of_its_own_step(plan: str) -> None:
    """The optimizer reads its decay from its group, or from a table by its count of steps."""

    class Decaying(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                counts = [
                    int(self.state[one]["step"]) for one in group["params"] if one in self.state
                ]
                group["weight_decay"] = 0.1 * max(counts, default=0)
            return super().step(closure)

    def train(world: World, kind: Any, writes: bool) -> dict[str, Tensor]:
        engine = plait.build(
            net(),
            f"{plan} precision:float64",
            loss=F.mse_loss,
            optimizer=lambda params: kind(params, lr=0.1, weight_decay=0.0),
            world=world,
        )
        for index, batch in enumerate(batches()):
            if writes:
                for group in engine.update.optimizer.param_groups:
                    group["weight_decay"] = 0.1 * index
            engine.step(batch)
        engine.flush()
        return {part.name: part.values.clone() for part in engine.local_parameters()}

    counted = threaded(2, train, Decaying, False, plan=plan)
    written = threaded(2, train, torch.optim.AdamW, True, plan=plan)
    for expected, found in zip(counted, written, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
