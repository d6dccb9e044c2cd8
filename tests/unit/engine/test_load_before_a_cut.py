"""A checkpoint that is loaded before the first batch shows where the model is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from plait.engine import Engine
from plait.errors import CheckpointError


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.third(hidden + torch.relu(self.second(hidden)))


def built(world: World, plan: str, seed: int) -> Engine:
    torch.manual_seed(seed)
    return plait.build(
        Skips(),
        plan,
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        world=world,
    )


def went_on(world: World, plan: str, folder: str) -> tuple[list[float], list[float], list[int]]:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 4, 3, generator=generator).unbind() for _ in range(5)]
    engine = built(world, plan, 0)
    for batch in batches[:3]:
        engine.step(batch)
    engine.save(Path(folder) / "saved")
    expected = [engine.step(batch).loss for batch in batches[3:]]
    later = built(world, plan, 1)
    with pytest.raises(CheckpointError):
        later.load(Path(folder) / "nowhere")
    steps = [later.load(Path(folder) / "saved")["step"], later.step_index]
    found = [later.step(batch).loss for batch in batches[3:]]
    return expected, found, [*steps, later.step_index]


@pytest.mark.parametrize("plan", ["pp2 mb2", "tp2"])
def test_a_load_waits_until_the_model_is_cut(ranks: Any, plan: str, tmp_path: Path) -> None:
    for expected, found, steps in ranks(2, went_on, plan, str(tmp_path), plan=plan):
        assert found == expected
        assert steps == [3, 3, 5]


def of_another_optimizer(world: World, folder: str) -> int:
    batch = torch.ones(4, 3), torch.zeros(4, 3)
    engine = built(world, "tp2", 0)
    engine.step(batch)
    engine.save(Path(folder) / "saved")
    sgd = lambda params: torch.optim.SGD(params, lr=1e-2)  # noqa: E731
    other = plait.build(Skips(), "tp2", loss=F.mse_loss, optimizer=sgd, world=world)
    other.load(Path(folder) / "saved")
    for _ in range(2):
        with pytest.raises(CheckpointError):
            other.step(batch)
    return other.step_index


def test_a_load_that_fails_later_fails_each_step(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, of_another_optimizer, str(tmp_path), plan="tp2") == [0, 0]


def evaluated_first(world: World, plan: str) -> list[float]:
    batch = torch.ones(4, 3), torch.zeros(4, 3)
    engine = built(world, plan, 0)
    with torch.inference_mode():
        first = engine.evaluate(batch)
    return [first, engine.step(batch).loss]


@pytest.mark.parametrize("plan", ["pp2 mb2", "tp2"])
def test_an_evaluation_without_autograd_may_cut_the_model(ranks: Any, plan: str) -> None:
    for first, second in ranks(2, evaluated_first, plan, plan=plan):
        assert first == pytest.approx(second, rel=1e-6)
