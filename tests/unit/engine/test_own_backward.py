"""A backward of the caller's own, between two steps, leaves the steps as they would be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from tests.helpers.threaded import threaded

PLANS = ("dp1", "dp2", "dp2:zero1", "dp2:zero2", "dp2:zero3", "dp2:server", "tp2")
BATCHES = [(torch.full((4, 12), 0.1 * n), torch.ones(4, 12)) for n in range(1, 4)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))


def train(
    world: World, models: list[nn.Sequential], plan: str, own: str
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The parts of the parameters after three steps, and the gradients of the own backward."""
    model = models[world.rank].double()
    batches = [(inputs.double(), targets.double()) for inputs, targets in BATCHES]
    engine = plait.build(
        model,
        f"{plan} precision:float64",
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        world=world,
    )
    left: list[Tensor | None] = []
    for inputs, targets in engine.prepare(batches):
        engine.step((inputs, targets), trace=False)
        if own == "by all" or (own == "by one" and world.rank == 0):
            F.mse_loss(model(inputs), 3 * targets).backward()
            left = [param.grad for param in model.parameters()]
        if own == "by hand":
            for param in model.parameters():
                param.grad = torch.ones_like(param)
    return [shard.values.clone() for shard in engine.local_parameters()], left


def expect_steps_as_without(plan: str, own: str) -> list[Tensor | None]:
    size = plait.Plan.parse(plan).world_size
    without = threaded(size, train, [net() for _ in range(size)], plan, "", plan=plan)
    beside = threaded(size, train, [net() for _ in range(size)], plan, own, plan=plan)
    for (expected, _), (values, _) in zip(without, beside, strict=True):
        for one, other in zip(expected, values, strict=True):
            assert torch.equal(one, other)
    left: list[Tensor | None] = beside[0][1]
    return left


@pytest.mark.parametrize("plan", PLANS)
def test_a_backward_on_all_ranks_changes_no_step(plan: str) -> None:
    expect_steps_as_without(plan, "by all")


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero1", "dp2:zero2", "dp2:server"])
def test_a_backward_on_one_rank_sends_nothing_and_leaves_its_gradients(plan: str) -> None:
    left = expect_steps_as_without(plan, "by one")
    assert len(left) == 4
    assert all(grad is not None and bool(grad.any()) for grad in left)


@pytest.mark.parametrize("plan", ["dp1", "dp2:zero1", "tp2"])
def test_gradients_that_the_caller_wrote_are_not_in_the_next_step(plan: str) -> None:
    expect_steps_as_without(plan, "by hand")
