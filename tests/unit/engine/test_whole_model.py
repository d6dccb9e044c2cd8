"""A model that a pipeline has cut is neither called nor copied as a whole by one rank."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.comm import World
from tests.helpers.threaded import threaded


class Branched(nn.Module):
    """No chain: its stages replay its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).tanh()
        return self.head(hidden + self.second(hidden))


class Cached(nn.Module):
    """A layer that keeps a table from its first call on."""

    table: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(6, dtype=inputs.dtype).cos()
        return self.linear(inputs).tanh() * self.table


class Skipping(nn.Module):
    """No chain, of layers with tables."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Cached(), Cached(), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.head(hidden + self.second(hidden))


def chain_of_tables() -> nn.Module:
    return nn.Sequential(Cached(), Cached(), Cached(), nn.Linear(6, 3))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def twice(make: Callable[[], nn.Module]) -> list[nn.Module]:
    """Equal models of two ranks."""
    model = make()
    return [model, copy.deepcopy(model)]


def trained(world: World, model: nn.Module, plan: str) -> plait.Engine:
    """An engine after a step and an evaluation, which the guard lets pass."""
    engine = plait.build(model, plan, loss=F.cross_entropy, optimizer=torch.optim.SGD, world=world)
    batch = (torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
    engine.step(batch)
    engine.evaluate(batch)
    return engine


def refused(model: nn.Module, action: Callable[[nn.Module], object]) -> str:
    with pytest.raises(plait.errors.ModelError) as caught:
        action(model)
    return str(caught.value)


def call(model: nn.Module) -> object:
    return model(torch.ones(2, 6))


def copied_state(model: nn.Module) -> object:
    return copy.deepcopy(model).state_dict()


def saved(model: nn.Module) -> None:
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("make", [chain, Branched])
def test_calls_and_states_of_a_cut_model_are_refused(make: Callable[[], nn.Module]) -> None:
    models = twice(make)

    def work(world: World) -> list[str]:
        model = trained(world, models[world.rank], "pp2").model
        return [refused(model, one) for one in (call, nn.Module.state_dict, copied_state, saved)]

    for called, state, copied, pickled in threaded(2, work, plan="pp2"):
        assert "cannot be called on one rank" in called
        assert "cut it into 2 stages" in called
        assert "engine.measure(batch, [function])" in called
        assert "engine.save_pretrained(path)" in state
        assert copied == state
        assert "a model cannot be pickled on one rank: a pipeline has cut it into 2" in pickled


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero2", "tp2"])
def test_a_model_that_is_whole_on_its_rank_may_be_called(plan: str) -> None:
    models = twice(chain)

    def work(world: World) -> tuple[int, ...]:
        return tuple(trained(world, models[world.rank], plan).model(torch.ones(2, 6)).shape)

    assert threaded(2, work, plan=plan) == [(2, 3), (2, 3)]


def test_a_model_may_be_called_again_under_an_engine_of_one_stage() -> None:
    models = twice(chain)

    def cut(world: World) -> None:
        trained(world, models[world.rank], "pp2")

    def whole(world: World) -> int:
        return len(trained(world, models[world.rank], "dp1").model.state_dict())

    threaded(2, cut, plan="pp2")
    with pytest.warns(UserWarning, match="cut into stages by an earlier engine, and has zeros"):
        assert threaded(1, whole, plan="dp1") == [6]


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("plan", ["dp2", "tp2", "pp2", "pp2:1f1b mb2"])
@pytest.mark.parametrize("make", [chain_of_tables, Skipping])
def test_a_cut_model_is_built_again_under_any_plan(
    make: Callable[[], nn.Module], plan: str
) -> None:
    models = twice(make)

    def work(world: World, plan: str) -> None:
        trained(world, models[world.rank], plan)

    threaded(2, work, "pp2", plan="pp2")
    threaded(2, work, plan, plan=plan)
