"""`fit` reads a loader that ends again from its start."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import plait
from plait.comm import World
from plait.engine.engine import Engine
from plait.errors import DataError
from tests.helpers.threaded import threaded

MODEL = nn.Linear(2, 1)


def engine_on(world: World) -> Engine:
    return plait.build(
        copy.deepcopy(MODEL),
        "dp2",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )


def loader() -> Any:
    return DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)


def test_a_loader_of_two_batches_trains_for_five_steps() -> None:
    def on_rank(world: World) -> int:
        engine = engine_on(world)
        plait.fit(engine, engine.prepare(loader()), 5)
        return engine.step_index

    assert threaded(2, on_rank) == [5, 5]


def test_an_iterator_that_is_read_once_is_named() -> None:
    def on_rank(world: World) -> str:
        engine = engine_on(world)
        with pytest.raises(DataError) as error:
            plait.fit(engine, iter(list(engine.prepare(loader()))), 5)
        return str(error.value)

    for message in threaded(2, on_rank):
        assert "a list_iterator, has no batch left after step 2 of 5" in message
