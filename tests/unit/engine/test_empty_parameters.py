"""A parameter without elements is saved by its name: no strategy has a place for it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from tests.helpers.threaded import threaded

safetensors = pytest.importorskip("safetensors.torch")


class WithEmptyPrompt(nn.Module):
    """A linear layer beside a learnt prompt of zero rows."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(0, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([self.prompt, x]))


def drawn(seed: int) -> nn.Module:
    """A model drawn before the ranks start: as threads they share torch's random numbers."""
    torch.manual_seed(seed)
    return WithEmptyPrompt()


def engine_on(world: World, plan: str, model: nn.Module) -> Engine:
    return build(
        copy.deepcopy(model),
        plan,
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        options=Options(),
        world=world,
    )


@pytest.mark.quick
@pytest.mark.parametrize("plan", ["dp2", "dp2:zero1", "dp2:zero3"])
def test_an_empty_parameter_is_saved_and_loaded(plan: str, tmp_path: Path) -> None:
    trained, other = drawn(seed=0), drawn(seed=1)

    def on(world: World) -> None:
        engine = engine_on(world, plan, trained)
        engine.step((torch.ones(2, 4), torch.zeros(2, 4)))
        engine.save(tmp_path / "saved")
        engine.save_pretrained(tmp_path / "files")

    def again(world: World) -> None:
        engine = engine_on(world, "dp1", other)
        engine.load(tmp_path / "saved")
        engine.save_pretrained(tmp_path / "again")

    threaded(2, on, plan=plan)
    threaded(1, again, plan="dp1")
    first, second = (
        safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("files", "again")
    )
    assert first["prompt"].shape == (0, 4)
    assert first.keys() == second.keys() == {"prompt", "layer.weight", "layer.bias"}
    assert all(torch.equal(first[name], second[name]) for name in first)
