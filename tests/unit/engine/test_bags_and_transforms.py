"""Offsets of bags in a divided batch, and transforms of `torch.func` under `zero3`, are named."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

import plait
from plait.comm import World
from plait.errors import DataError, ModelError
from plait.values import PyTree
from tests.helpers.threaded import threaded


class Curved(nn.Module):
    """The slope of a network at each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.last = nn.Linear(8, 1)

    def at(self, x: Tensor) -> Tensor:
        """[3] -> 0-dim."""
        return cast(Tensor, self.last(torch.tanh(self.first(x)))).squeeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 3] -> [samples]."""
        return cast(Tensor, vmap(grad(self.at))(x)).sum(-1)


class Bags(nn.Module):
    """A number of each bag of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(20, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """[tokens], [samples] -> [samples]."""
        return cast(Tensor, self.last(self.bags(tokens, offsets))).squeeze(-1)


def train(world: World, whole: nn.Module, inputs: PyTree, plan: str) -> None:
    engine = plait.build(
        copy.deepcopy(whole),
        plan,
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    for batch in engine.prepare([(inputs, torch.zeros(8))]):
        engine.step(batch)


def test_zero3_refuses_to_gather_inside_of_a_transform() -> None:
    match = r"zero3 cannot gather .* inside of a transform of torch.func, .* take dp or zero2"
    with pytest.raises(ModelError, match=match):
        threaded(2, train, Curved(), torch.ones(8, 3), "dp2:zero3", plan="dp2:zero3")


def test_offsets_of_a_whole_batch_are_named() -> None:
    inputs = (torch.arange(8), torch.arange(8))
    with pytest.raises(DataError, match=r"offsets of an EmbeddingBag .* padded tensor"):
        threaded(2, train, Bags(), inputs, "dp2", plan="dp2")
