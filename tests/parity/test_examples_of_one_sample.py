"""Pipelines whose model refuses the one sample by which stages are cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.errors import ModelError
from tests.parity.few_steps import batch, drawn, losses, plain
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]


class Squeezed(nn.Module):
    """Drops the dim of its gate by `squeeze`, and so that of a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.gate = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> [samples, 4], of several samples."""
        weight = self.gate(x).squeeze()
        for layer in self.layers:
            x = layer(x).tanh()
        gated: Tensor = torch.stack([weight, x[:, 0]], dim=1).sum(dim=1, keepdim=True) * x
        return gated


class Particular(Squeezed):
    """Takes four samples alone."""

    def forward(self, x: Tensor) -> Tensor:
        """[4, 4] -> [4, 4]."""
        if len(x) != 4:
            raise RuntimeError("four samples, please")
        return super().forward(x)


def test_a_model_that_needs_two_samples_is_cut(ranks: Run) -> None:
    model, pair = drawn(Squeezed()), batch(4)
    alone = plain(copy.deepcopy(model), pair)
    for found in ranks(2, losses, copy.deepcopy(model), "pp2:1f1b mb2", pair, plan="pp2:1f1b mb2"):
        assert found == pytest.approx(alone, rel=TOLERANCE, abs=0)


def refusal(world: World) -> str:
    """What the first step of a model says that takes four samples alone."""
    engine = plait.build(
        Particular(),
        "pp2:1f1b mb1",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    with pytest.raises(ModelError) as refused:
        engine.step((torch.ones(4, 4), torch.zeros(4, 4)))
    return str(refused.value)


def test_a_refusal_of_the_example_is_named_with_its_cure(ranks: Run) -> None:
    for found in ranks(2, refusal, plan="pp2:1f1b mb1"):
        assert "run on one sample, whose inputs are [1, 4]" in found
        assert "four samples, please" in found
        assert "Cutting(example=...)" in found
