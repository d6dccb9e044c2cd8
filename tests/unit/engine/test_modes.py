"""Modules that a caller leaves in evaluation stay so while the model trains."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.loops.calls import LossCalls
from plait.loops.module import make_module
from plait.plan import Plan
from tests.helpers.threaded import threaded

PLANS = ("dp1", "dp2:zero3", "tp2", "pp2 mb2")


def frozen_statistics() -> nn.Sequential:
    """A model whose batch norm and dropout are in evaluation."""
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8)
    nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
    layers = [nn.Linear(8, 8), norm.eval(), nn.Dropout(0.5).eval(), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 2)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(4, 8, generator=generator, dtype=torch.float64),
            torch.randn(4, 2, generator=generator, dtype=torch.float64),
        )
        for _ in range(3)
    ]


def plain(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, targets in batches():
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def engine_of(world: World, model: nn.Module, plan: str) -> plait.Engine:
    return plait.build(
        model,
        Plan.parse(f"{plan} precision:float64"),
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )


def trained(world: World, models: list[nn.Module], plan: str, between: str) -> list[float]:
    """The losses of steps, with an evaluation between two of them."""
    model = models[world.rank]
    engine = engine_of(world, model, plan)
    losses = []
    for batch in engine.prepare(batches()):
        losses.append(engine.step(batch, trace=False).loss)
        if between == "the engine's evaluation":
            engine.evaluate(batch)
        elif between == "the caller's":
            model.eval()
    return losses


@pytest.mark.parametrize("between", ["nothing", "the engine's evaluation", "the caller's"])
@pytest.mark.parametrize("plan", PLANS)
def test_modules_in_evaluation_stay_in_evaluation(plan: str, between: str) -> None:
    size = Plan.parse(plan).world_size
    models = [frozen_statistics() for _ in range(size)]
    losses = threaded(size, trained, models, plan, between, plan=plan)[0]
    assert losses == pytest.approx(plain(frozen_statistics()), rel=1e-10)


def whole(world: World, model: nn.Module) -> list[bool]:
    engine = engine_of(world, model, "dp1")
    engine.step(batches()[0], trace=False)
    return [module.training for module in model.modules()]


def test_a_model_in_evaluation_as_a_whole_is_trained_as_a_whole() -> None:
    """`from_pretrained` gives a model in evaluation."""
    assert all(threaded(1, whole, frozen_statistics().eval())[0])


def test_a_module_that_changes_its_mode_between_steps_is_followed() -> None:
    model = frozen_statistics()

    def modes(world: World) -> list[bool]:
        engine = engine_of(world, model, "dp1")
        seen = []
        for change in (lambda: None, model.train, model[2].eval):
            change()
            engine.step(batches()[0], trace=False)
            seen.append(model[2].training)
        return seen

    assert threaded(1, modes)[0] == [False, True, False]


def test_a_loop_that_trains_the_prepared_module_trains_all_of_the_model() -> None:
    model = frozen_statistics()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module, _ = make_module(LossCalls(model, F.mse_loss), optimizer, "dp1 precision:float64")
    module.train()
    module.engine.world.close()
    assert all(one.training for one in model.modules())
