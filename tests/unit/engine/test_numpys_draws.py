"""Numbers that a model draws from numpy depend on the step and the micro-batch, and no user's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from tests.helpers.threaded import threaded

DRAWS: dict[str, Callable[[], float]] = {"numpy": numpy.random.rand, "python": random.random}


class Drawing(nn.Module):
    """A layer that remembers the numbers its forward draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = draw
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(self.draw())
        return self.linear(x)


def drawn_by(draw: Callable[[], float], steps: int = 2) -> list[float]:
    model = Drawing(draw)
    engine = plait.build(
        model,
        "dp1 mb2",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    for _ in range(steps):
        engine.step((torch.ones(4, 4), torch.zeros(4, 4)), trace=False)
    return model.drawn


@pytest.fixture(autouse=True)
def _kept_states():
    states = numpy.random.get_state(), random.getstate()
    yield
    numpy.random.set_state(states[0])
    random.setstate(states[1])


@pytest.mark.parametrize("name", DRAWS)
def test_each_micro_batch_has_numbers_of_its_own_in_every_run(name: str) -> None:
    first = drawn_by(DRAWS[name])
    assert len(set(first)) == 4
    assert drawn_by(DRAWS[name]) == first


@pytest.mark.parametrize("name", DRAWS)
def test_the_users_draws_go_on_as_without_a_step(name: str) -> None:
    numpy.random.seed(3)
    random.seed(3)
    expected = [DRAWS[name](), DRAWS[name]()]
    numpy.random.seed(3)
    random.seed(3)
    found = [DRAWS[name]()]
    drawn_by(DRAWS[name])
    assert [*found, DRAWS[name]()] == expected


def test_another_generator_of_the_users_own_goes_on_as_without_a_step() -> None:
    users = numpy.random.get_bit_generator()
    other = numpy.random.PCG64(1)
    numpy.random.set_bit_generator(other)
    try:
        drawn_by(numpy.random.rand)
        assert numpy.random.get_bit_generator() is other
        found = numpy.random.rand()
    finally:
        numpy.random.set_bit_generator(users)
    assert found == numpy.random.RandomState(numpy.random.PCG64(1)).rand()


def test_ranks_that_are_threads_do_not_wait_for_each_others_draws() -> None:
    model = nn.Linear(4, 4)

    def train(world: World) -> None:
        engine = plait.build(
            copy.deepcopy(model),
            "dp4",
            loss=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            world=world,
        )
        for _ in range(100):
            engine.step((torch.ones(4, 4), torch.zeros(4, 4)), trace=False)

    threaded(4, train, plan="dp4")
