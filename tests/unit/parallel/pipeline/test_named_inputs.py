"""A linear layer whose products plait chooses takes its input by the name that it had."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

import plait
from plait.comm import World
from tests.helpers.threaded import threaded


class ByName(nn.Module):
    """Calls its layers by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), Conv1D(3, 6)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.second(x=self.first(input=input).tanh())


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def losses(world: World, models: list[nn.Module], plan: str) -> list[float]:
    engine = plait.build(
        models[world.rank].double(),
        plan,
        loss=lambda output, batch: F.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
    batch = {"input": inputs, "y": torch.tensor([0, 1, 2, 1])}
    return [engine.step(batch).loss for _ in range(3)]


@pytest.mark.parametrize("make", [chain, ByName])
@pytest.mark.parametrize("plan", ["pp2", "pp2:zb-h1 mb2"])
def test_a_mapping_goes_through_a_pipeline_as_on_one_device(plan: str, make: type) -> None:
    model = make()
    plans = {"dp1": 1, plan: 2}
    whole, parted = (
        threaded(
            size,
            losses,
            [copy.deepcopy(model) for _ in range(size)],
            f"{text} precision:float64",
            plan=text,
        )[0]
        for text, size in plans.items()
    )
    assert parted == pytest.approx(whole, rel=1e-12)
