"""The attribute `count` of a loss: what counts the targets, and what means something else."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.engine.batch import MicroBatch
from plait.engine.expected_count import ExpectedCount
from plait.errors import ModelError

MODEL = nn.Linear(6, 3)
INPUTS = torch.linspace(-1.0, 1.0, 24).view(4, 6)
TARGETS = torch.tensor([0, 2, 1, 2])


class Calls:
    """A loss with a method that tells how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        return self.calls

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, targets)


class Scaled(NamedTuple):
    """A loss whose settings are a tuple, which has a method `count` of its own."""

    scale: float = 1.0

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets) * self.scale


class Sum:
    """(sum, count), and beside it any function of the targets."""

    def __init__(self, count: Any) -> None:
        self.count = count

    def __call__(self, output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(output, targets, reduction="sum"), len(targets)


def trained(loss: Any, plan: str) -> Tensor:
    """The weight [3, 6] after one step."""
    engine = plait.build(
        deepcopy(MODEL), plan, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.5)
    )
    engine.step((INPUTS, TARGETS), trace=False)
    return engine.model.weight.detach()


def plain() -> Tensor:
    """The same of a plain loop."""
    model = deepcopy(MODEL)
    F.cross_entropy(model(INPUTS), TARGETS).backward()
    return (model.weight - 0.5 * model.weight.grad).detach()


@pytest.mark.parametrize("plan", ["dp1", "mb2"])
@pytest.mark.parametrize(
    "loss",
    [
        Calls(),
        Scaled(),
        Sum(len),
        Sum(torch.numel),
        Sum(lambda targets: targets.new_tensor([4])),
        Sum(lambda targets: torch.tensor(2.0, requires_grad=True)),
    ],
    ids=["calls", "tuple", "len", "torch", "one element", "with a gradient"],
)
def test_a_step_is_right_whatever_the_name_count_is_of(loss: Any, plan: str) -> None:
    torch.testing.assert_close(trained(loss, plan), plain())


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "returned None"),
        ("3", "returned '3'"),
        (float("nan"), "returned nan"),
        (torch.ones(4), r"a tensor of shape \(4,\)"),
    ],
)
def test_a_count_that_is_no_number_is_named(found: Any, said: str) -> None:
    with pytest.raises(ModelError, match=f"`count` of the loss .*{said}"):
        trained(Sum(lambda targets: found), "dp1")


def test_a_count_of_targets_is_a_tensor_whatever_its_function_returns() -> None:
    """A recorded step takes another value of a tensor; each number would be a graph of its own."""
    expected = ExpectedCount(None, torch.device("cpu"), count=len)
    count = expected.of([MicroBatch(INPUTS, TARGETS, 4)])
    assert isinstance(count, Tensor) and float(count) == 4.0
