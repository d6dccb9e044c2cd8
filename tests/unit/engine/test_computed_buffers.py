"""A buffer that each data rank computes from its own samples is told of once."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm import World
from tests.helpers.threaded import threaded

TOLD = "data ranks have other values of 'centre'; each"


class Centred(nn.Module):
    """Subtracts a moving mean of its samples; `new`: whether each forward makes it anew.

    `hidden`: whether each writes into its data, which no version counts.
    """

    def __init__(self, *, new: bool = False, persistent: bool = True, hidden: bool = False) -> None:
        super().__init__()
        self.new = new
        self.hidden = hidden
        self.linear = nn.Linear(4, 4)
        self.norm: nn.Module = nn.BatchNorm1d(4)
        self.instances = nn.InstanceNorm1d(4, track_running_stats=True)
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(4), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        y = self.instances(self.norm(self.linear(x)).unsqueeze(2).expand(-1, -1, 2)).mean(2)
        if self.training:
            with torch.no_grad():
                moved = 0.9 * self.centre + 0.1 * x.mean(0)
                if self.new:
                    self.centre = moved
                elif self.hidden:
                    self.centre.data.copy_(moved)
                else:
                    self.centre.copy_(moved)
        return y - self.centre


class Counted(nn.Module):
    """Keeps what is alike on all ranks: the largest singular vector, and a number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> the same."""
        self.steps += 1
        return self.linear(x)


def said(
    model: nn.Module, plan: str, *, ranks: int = 2, averages: bool = False, samples: int = 4
) -> list[str]:
    """The warnings of three steps; the last rank has `samples`, the others 4."""

    def train(world: World) -> None:
        engine = plait.build(
            copy.deepcopy(model),
            plan,
            loss=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            world=world,
        )
        numbers = torch.Generator().manual_seed(world.rank)
        count = samples if world.rank == world.size - 1 else 4
        for _ in range(3):
            engine.step((torch.randn(count, 4, generator=numbers), torch.zeros(count, 4)))
            if averages:
                axis = engine.world.axis("dp")
                axis.all_reduce(engine.model.centre).wait()
                engine.model.centre.div_(axis.size)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threaded(ranks, train, plan=plan)
    return [str(one.message) for one in caught if "data ranks have other" in str(one.message)]


@pytest.mark.parametrize(
    "model", [Centred(), Centred(new=True), Centred(hidden=True)], ids=["in_place", "new", "data"]
)
def test_a_buffer_of_the_samples_is_told_once(model: nn.Module) -> None:
    (text,) = said(model, "dp2")
    assert TOLD in text
    assert "engine.world.axis('dp').all_reduce(buffer)" in text
    assert "a queue of samples, as MoCo's, is no mean" in text


@pytest.mark.parametrize("plan", ["dp2 mb2", "dp2:zero3"])
def test_a_buffer_is_told_under_other_plans(plan: str) -> None:
    assert len(said(Centred(), plan)) == 1


def test_a_rank_without_samples_takes_part() -> None:
    model = Centred()
    model.norm = nn.Identity()  # a batch norm refuses the one sample in the place of none
    assert len(said(model, "dp2", samples=0)) == 1


def test_a_stage_tells_of_its_own_buffers() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Centred(), nn.Linear(4, 4), nn.Linear(4, 4))
    (text,) = said(layers, "dp2 pp2 mb2", ranks=4)
    assert "'1.centre'" in text


def test_what_ranks_have_alike_is_not_told() -> None:
    assert said(Counted(), "dp2") == []
    assert said(Centred(), "dp2", averages=True) == []
    assert said(Centred(persistent=False), "dp2") == []
    assert said(Centred(), "dp1", ranks=1) == []
    assert said(Centred(), "dp2:local,every4") == []
