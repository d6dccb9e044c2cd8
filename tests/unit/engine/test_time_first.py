"""A batch with time first, which a plan would divide along time, is told by its layers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from tests.helpers.threaded import threaded

TIME, SAMPLES, WIDTH = 12, 4, 6
PARTS = ("dp2", "dp1 mb2", "pp2 mb2")
MATCH = r"'recurrent' takes dim 0 of its input \[6, 4, 6\] as time, .* into 2 parts"


class Net(nn.Module):
    """A layer of torch between two others; `turns`: whether the forward transposes its input."""

    def __init__(self, kind: str = "lstm", *, turns: bool = False, batch_first: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.turns = turns
        self.first = nn.Linear(WIDTH, WIDTH)
        self.recurrent: Any = nn.LSTM(WIDTH, WIDTH, batch_first=batch_first)
        if kind == "attention":
            self.recurrent = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[time, samples, width], or [samples, time, width] where it transposes -> the same."""
        x = self.first(x.transpose(0, 1) if self.turns else x)
        if isinstance(self.recurrent, nn.LSTM):
            x = self.recurrent(x)[0]
        else:
            x = self.recurrent(query=x, key=x, value=x)[0]
        x = self.last(x)
        return x.transpose(0, 1) if self.turns else x


class OneByOne(Net):
    """Runs the layer sample by sample, the first of which has as many steps as there are others."""

    def forward(self, x: Tensor) -> Tensor:
        """[samples, time, width] -> the same."""
        steps = [x.shape[0], *(TIME - index for index in range(1, x.shape[0]))]
        return torch.stack(
            [
                self.last(self.recurrent(self.first(one[:count]).unsqueeze(1))[0][0, 0])
                for one, count in zip(x, steps, strict=True)
            ]
        )


class Folded(Net):
    """Runs the layer along a dim behind the samples, with another folded into its batch."""

    def forward(self, x: Tensor) -> Tensor:
        """[samples, time, places, width] -> the same."""
        folded = self.first(x).transpose(0, 1).flatten(1, 2)
        out = self.recurrent(folded)[0].unflatten(1, (x.shape[0], x.shape[2]))
        return self.last(out).transpose(0, 1)


class Unrolled(Net):
    """Runs the layer on one time step, with several candidates of each sample as its batch."""

    def forward(self, x: Tensor) -> Tensor:
        """[samples, time, width] -> the same."""
        step = self.recurrent(self.first(x[:, 0]).repeat_interleave(3, 0).unsqueeze(0))[0]
        return x + self.last(step[0].unflatten(0, (-1, 3)).mean(1)).unsqueeze(1)


def trained(world: World, plan: str, model: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(shape)
    targets = torch.zeros_like(inputs) if not isinstance(model, OneByOne) else inputs[:, 0]
    engine = plait.build(
        model,
        plan,
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    for batch in engine.prepare([(inputs, targets)] * 5):
        engine.step(batch, trace=False)


def by_rank(world: World, plan: str, models: list[nn.Module], shape: tuple[int, ...]) -> None:
    trained(world, plan, models[world.rank], shape)


def ran(plan: str, models: list[nn.Module], shape: tuple[int, ...]) -> None:
    size = plait.Plan.parse(plan).world_size
    threaded(size, by_rank, plan, models[:size], shape, plan=plan)


@pytest.mark.parametrize("kind", ["lstm", "attention"])
@pytest.mark.parametrize("plan", PARTS)
def test_a_batch_with_time_first_is_told(kind: str, plan: str) -> None:
    with pytest.warns(UserWarning, match=MATCH) as told:
        ran(plan, [Net(kind), Net(kind)], (TIME, SAMPLES, WIDTH))
    assert sum("as time" in str(one.message) for one in told) <= 2  # once a stage


@pytest.mark.parametrize("kind", ["lstm", "attention"])
@pytest.mark.parametrize("plan", PARTS)
def test_samples_first_are_not_told_of(kind: str, plan: str) -> None:
    shape = SAMPLES, TIME, WIDTH
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran(plan, [Net(kind, turns=True), Net(kind, turns=True)], shape)
        ran(plan, [Net(kind, batch_first=True), Net(kind, batch_first=True)], shape)


def test_a_layer_that_runs_sample_by_sample_is_not_told_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran("dp1 mb2", [OneByOne()], (2 * SAMPLES, TIME, WIDTH))


def test_another_dim_in_the_batch_of_a_layer_is_not_told_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran("dp1 mb2", [Folded()], (2 * SAMPLES, SAMPLES, 3, WIDTH))
        ran("dp1 mb2", [Unrolled()], (2, SAMPLES, WIDTH))


def test_time_first_is_told_where_samples_are_a_multiple_of_the_steps() -> None:
    with pytest.warns(UserWarning, match=r"its input \[2, 4, 6\] as time"):
        ran("dp1 mb2", [Net()], (4, SAMPLES, WIDTH))


def test_a_copy_of_the_model_notes_nothing() -> None:
    model = Net(turns=True)
    engine = plait.build(model, "mb2", loss=F.mse_loss, optimizer=torch.optim.SGD)
    inputs = torch.randn(SAMPLES, TIME, WIDTH)
    engine.step((inputs, inputs))
    engine.world.close()
    copied = copy.deepcopy(model)
    copied(inputs)
    (hook,) = copied.recurrent._forward_pre_hooks.values()
    assert not hook.func.__self__._shapes


def test_hooks_do_not_stay() -> None:
    model = Net(turns=True)
    ran("dp1 mb2", [model], (SAMPLES, TIME, WIDTH))
    assert not model.recurrent._forward_pre_hooks
