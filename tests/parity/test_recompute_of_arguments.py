"""Blocks under `remat` that write into what they are given, such as a dictionary or a cache, or
keep a tensor in an attribute for the next step.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import World
from plait.errors import ModelError
from tests.helpers.sgd import drawn_batch, on_one_device, sgd_engine, three_losses
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE

Step = Callable[[nn.Module, Any], None]
PLANS = ["dp1 remat:full", "dp2 remat:selective", "dp2:zero3 remat:full mb2"]


class Layer:
    """What a cache has of one block."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


def in_dictionary(linear: nn.Module, held: Any) -> None:
    held["x"] = held["x"] + linear(held["x"]).tanh()


def in_list(linear: nn.Module, held: Any) -> None:
    held["list"].append(held["list"][-1] + linear(held["list"][-1]).tanh())
    held["x"] = held["list"][-1]


def in_object(linear: nn.Module, held: Any) -> None:
    inside = held.setdefault("object", SimpleNamespace(x=held["x"]))
    inside.x = inside.x + linear(inside.x).tanh()
    held["x"] = inside.x


def in_cache(linear: nn.Module, held: Any) -> None:
    cache = held.setdefault("cache", {}).setdefault(id(linear), Layer())
    cache.keys.append(linear(held["x"]))
    held["x"] = held["x"] + torch.stack(cache.keys).tanh().sum(0)


def in_tensor(linear: nn.Module, held: Any) -> None:
    sums = held.setdefault("sums", held["x"].new_zeros(len(held["x"]), 1))
    y = linear(held["x"] + sums).tanh()
    sums += y.detach().mean(1, keepdim=True)
    held["x"] = y


class Writing(nn.Module):
    """A block that takes a dictionary and writes into it."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.step = step

    def forward(self, held: dict[str, Any]) -> dict[str, Any]:
        self.step(self.linear, held)
        return held


class Handing(nn.Module):
    """All blocks take and return one dictionary."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Writing(step) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        held: dict[str, Any] = {"x": x, "list": [x]}
        for layer in self.layers:
            held = layer(held)
        result: Tensor = held["x"]
        return result


class Remembering(nn.Module):
    """A block that adds what it gave in the last step."""

    def __init__(self, first: Tensor | None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.memory = first

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is not None:
            x = x + self.memory
        y = self.linear(x).tanh()
        self.memory = y.detach().mean(0)
        return y


def remembering(first: Tensor | None) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *(Remembering(first) for _ in range(3)))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("step", [in_dictionary, in_list, in_object, in_cache, in_tensor])
def test_backward_finds_arguments_as_the_forward_did(plan: str, step: Step) -> None:
    torch.manual_seed(0)
    model = Handing(step).double()
    batch = drawn_batch(8)
    expected = on_one_device(copy.deepcopy(model), batch)

    def on_rank(world: World) -> list[float]:
        axis = world.axis("dp")
        share = [part.tensor_split(axis.size)[axis.rank] for part in batch]
        return three_losses(sgd_engine(world, copy.deepcopy(model), plan, F.mse_loss, 0.1), share)

    for found in threaded(2 if "dp2" in plan else 1, on_rank, plan=plan):
        assert found == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("first", [None, torch.ones(6).double()])
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_backward_finds_attributes_as_the_forward_did(policy: str, first: Tensor | None) -> None:
    torch.manual_seed(0)
    model = remembering(first).double()
    expected = on_one_device(copy.deepcopy(model), drawn_batch(8))

    def on_rank(world: World) -> list[float]:
        engine = sgd_engine(world, copy.deepcopy(model), f"dp1 remat:{policy}", F.mse_loss, 0.1)
        return three_losses(engine, drawn_batch(8))

    for found in threaded(1, on_rank):
        assert found == pytest.approx(expected, rel=TOLERANCE)


class Telling(nn.Module):
    """A block that leaves a tensor with a graph and one without, and reads neither."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.aux = self.load = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        self.aux, self.load = y.square().mean(0), y.detach().mean(0)
        return y


def test_attributes_that_are_left_alone_are_not_told_as_read() -> None:
    def on_rank(world: World) -> list[float]:
        model = nn.Sequential(nn.Linear(6, 6), Telling(), Telling()).double()
        engine = sgd_engine(world, model, "dp1 mb2 remat:full", F.mse_loss, 0.1)
        return three_losses(engine, drawn_batch(8))

    assert len(threaded(1, on_rank)[0]) == 3  # a warning is an error here


class Keeping(nn.Module):
    """A block that keeps what it gave in an attribute of some kind, and adds the mean of it."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kept = kept
        self.turned = False

    def forward(self, x: Tensor) -> Tensor:
        values = self.kept.values() if isinstance(self.kept, dict) else self.kept
        y: Tensor = self.linear(x + sum(values)).tanh() * (2 if self.turned else 1)
        if isinstance(self.kept, dict):
            self.kept[len(self.kept)] = y.detach().mean(0)
        elif isinstance(self.kept, Tensor):
            self.kept.mul_(0.9).add_(y.detach().mean(0))
        else:
            self.kept.append(y.detach().mean(0))
        self.turned = not self.turned
        return y


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("kept", [[], {}, deque(maxlen=2), torch.zeros(1, 6).double()], ids=type)
def test_backward_finds_lists_of_a_block_as_the_forward_did(policy: str, kept: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Keeping(kept), Keeping(copy.deepcopy(kept))).double()
    expected = on_one_device(copy.deepcopy(model), drawn_batch(8))

    def on_rank(world: World) -> list[float]:
        engine = sgd_engine(world, copy.deepcopy(model), f"dp1 remat:{policy}", F.mse_loss, 0.1)
        return three_losses(engine, drawn_batch(8))

    for found in threaded(1, on_rank):
        assert found == pytest.approx(expected, rel=TOLERANCE)


class Adding(nn.Module):
    """A block that writes into a tensor that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, sums: Tensor) -> Tensor:
        y: Tensor = self.linear(x + sums).tanh()
        sums += y.detach().mean(0)
        return y


class Summing(nn.Module):
    """All blocks get one tensor; `named`: by its name."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(3))
        self.named = named

    def forward(self, x: Tensor) -> Tensor:
        sums = x.new_zeros(6)
        for layer in self.layers:
            x = layer(x, sums=sums) if self.named else layer(x, sums)
        return x


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_backward_finds_named_tensors_as_the_forward_did(policy: str) -> None:
    model = Summing(named=True).double()
    expected = on_one_device(copy.deepcopy(model), drawn_batch(8))

    def on_rank(world: World) -> list[float]:
        engine = sgd_engine(world, copy.deepcopy(model), f"dp1 remat:{policy}", F.mse_loss, 0.1)
        return three_losses(engine, drawn_batch(8))

    assert threaded(1, on_rank)[0] == pytest.approx(expected, rel=TOLERANCE)


def test_a_block_that_writes_into_its_argument_is_refused() -> None:
    def on_rank(world: World) -> str:
        model = Summing(named=False).double()
        engine = sgd_engine(world, model, "dp1 remat:full", F.mse_loss, 0.1)
        with pytest.raises(ModelError) as error:
            engine.step(drawn_batch(8))
        return str(error.value)

    message = threaded(1, on_rank)[0]
    assert "block 'layers.0' writes into its argument, a tensor [6], in place" in message
