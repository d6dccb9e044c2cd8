"""Modules that keep what they saw of their samples are refused where ranks have other samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import build
from plait.errors import NotAvailable
from plait.models import losses
from tests.helpers.threaded import threaded


class Range(nn.Module):
    """Remembers the largest value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().max())
        return x


def step(world: World, plan: str, model: nn.Module) -> float:
    engine = build(
        copy.deepcopy(model),
        plan,
        loss=losses.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    inputs: Any = torch.arange(16.0).view(4, 4)
    return engine.step((inputs, torch.arange(4)), trace=False).loss


def model() -> nn.Module:
    layers = [nn.Linear(4, 8), Range(), nn.ReLU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers)


def test_a_grid_refuses_them_and_names_the_module() -> None:
    words = r"'1' \(Range\) writes into its buffers \(largest\) .* tp4:2d .* use tpN:1d"
    with pytest.raises(NotAvailable, match=words):
        threaded(4, step, "tp4:2d", model(), plan="tp4:2d")


def test_one_dimension_takes_them() -> None:
    assert threaded(2, step, "tp2", model(), plan="tp2")[0] > 0
