"""Losses without a gradient are refused, and parameters that are not trained are named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.errors import ModelError
from plait.run.loop import fit
from plait.run.watch import Watch
from tests.helpers.threaded import threaded

Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Two experts of which the second gets nothing, a layer that nothing uses, a chain of links."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 2)
        nn.init.zeros_(self.last.weight)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.experts[0](self.first(x)))
        return out


class Idle(Net):
    """With a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def detached(output: Tensor, target: Tensor) -> Tensor:
    return squared(output.detach(), target)


def times_zero(output: Tensor, target: Tensor) -> Tensor:
    return squared(output, target) * 0.0


def engine_of(
    world: World, plan: str, model: nn.Module, loss: Loss, lr: float = 0.1, **keys: Any
) -> Engine:
    return build(
        model,
        plan,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        options=Options(**keys),
        world=world,
    )


def batch(world: World) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(world.rank)
    return torch.randn(4, 4, generator=generator), torch.ones(4, 2)


def watched(
    world: World, plan: str, model: nn.Module, loss: Loss, steps: int, **keys: Any
) -> list[str]:
    watch = Watch(lambda message: None)
    engine = engine_of(world, plan, copy.deepcopy(model), loss, **keys)
    fit(engine, [batch(world)] * steps, steps, [watch])
    return watch.warnings


@pytest.mark.parametrize("plan", ["dp1", "dp2", "dp2:zero3", "pp2:1f1b mb2", "pp2:pipedream mb2"])
def test_a_detached_loss_is_refused_at_the_first_step(plan: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def first_step(world: World) -> str:
        engine = engine_of(world, plan, copy.deepcopy(model), detached)
        try:
            engine.step(batch(world))
        except ModelError as refused:
            return str(refused)
        return "trained"

    size = 1 if plan == "dp1" else 2
    told = threaded(size, first_step, plan=plan)
    assert "step 1: the loss has no gradient" in told[-1] and "detach()" in told[-1]
    if "pipedream" not in plan:
        assert told == [told[0]] * size


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_where_autograd_is_off_names_the_caller(mode: Callable[[], Any]) -> None:
    def first_step(world: World) -> None:
        engine = engine_of(world, "dp1", Net(), squared)
        with mode(), pytest.raises(ModelError, match=r"engine.step was called under torch.no_grad"):
            engine.step(batch(world))
        engine.step(batch(world))

    threaded(1, first_step)


def test_a_model_without_anything_to_train_is_refused() -> None:
    def first_step(world: World) -> None:
        engine_of(world, "dp1", Net().requires_grad_(False), squared).step(batch(world))

    with pytest.raises(ModelError, match="the loss has no gradient"):
        threaded(1, first_step)


@pytest.mark.parametrize("plan", ["dp1", "dp2", "dp2:zero1", "dp2:zero3"])
def test_parameters_without_a_gradient_are_named_and_experts_are_not(plan: str) -> None:
    size = 1 if plan == "dp1" else 2
    told = threaded(size, watched, plan, Idle(), squared, 4, plan=plan)
    (said,) = told[0]
    assert said.startswith("no gradient has reached unused.bias, unused.weight: ")
    assert told == [told[0]] * size


def test_a_gradient_of_zero_is_said() -> None:
    (told,) = threaded(1, watched, "dp1", Net(), times_zero, 4)
    assert len(told) == 1 and "exactly 0 in each of the first 3 steps" in told[0]


def test_weights_that_do_not_move_are_named() -> None:
    (told,) = threaded(1, lambda world: watched(world, "dp1", Net(), squared, 4, lr=1e-30))
    assert len(told) == 1
    assert "did not move experts.0.bias, experts.0.weight, first.weight" in told[0]


@pytest.mark.parametrize("steps", [1, 2, 6])
@pytest.mark.parametrize("plan", ["pp2:pipedream mb2", "pp2:2bw mb2", "pp2:1f1b mb2"])
def test_a_sound_pipeline_says_nothing(plan: str, steps: int) -> None:
    """An asynchronous one updates inside its steps, and some stages after them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    assert threaded(2, watched, plan, model, squared, steps, plan=plan) == [[], []]


@pytest.mark.parametrize("steps", [1, 2, 4, 30])
def test_a_sound_run_says_nothing(steps: int) -> None:
    """Frozen parameters, experts without tokens, a last layer that is 0, a warm-up from 0."""
    assert threaded(1, watched, "dp1", Net(), squared, steps) == [[]]

    def warmed(world: World) -> list[str]:
        return watched(
            world, "dp1", Net(), squared, steps, learning_rate=lambda step: max(0, step - 3) / 20
        )

    assert threaded(1, warmed) == [[]]
