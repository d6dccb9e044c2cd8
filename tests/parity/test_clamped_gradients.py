"""Hooks that clamp the gradient of an activation do under every plan what they do on one device.

A clamp is not linear, so that it shows the scale which gradients have on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.stages.cut import Cutting
from plait.plan import Plan
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]
Loss = Callable[[Tensor, Tensor], Any]

LIMIT = 2e-3
NUM_STEPS = 3


class Clamped(nn.Module):
    """Layers of which each clamps the gradient of its result, elementwise."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(4))
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 6] -> the same."""
        for layer in self.layers:
            x = layer(x).sin()
            if x.requires_grad:
                x.register_hook(lambda grad: grad.clamp(-LIMIT, LIMIT))
        return x


def batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs [samples, 6] and targets of the same shape; the first element of some is masked."""
    generator = torch.Generator().manual_seed(10 + step)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    targets = inputs.flip(1)
    targets[::3, 0] = -100.0
    return inputs, targets


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets.clamp(min=-5))


def masked(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the elements that count, and how many there are."""
    counts = targets != -100.0
    return ((output - targets).square() * counts).sum(), counts.sum()


def count(targets: Tensor) -> Tensor:
    """What `masked` counts."""
    return (targets != -100.0).sum()


setattr(masked, "count", count)  # noqa: B010 (mypy has no type for an attribute of a function)
LOSSES: dict[str, Loss] = {"mean": mean, "masked": masked}


def trained(world: World, plan: str, loss: str, samples: int) -> list[float]:
    engine = build(
        Clamped(),
        f"{plan} precision:float64",
        loss=LOSSES[loss],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        options=Options(blocks="layers.*", cutting=Cutting(example=batch(0, 1)[0])),
        world=world,
    )
    axis = world.axis("dp")
    losses = []
    for step in range(NUM_STEPS):
        shares = [one.tensor_split(axis.size)[axis.rank] for one in batch(step, samples)]
        losses.append(engine.step((shares[0], shares[1])).loss)
    return losses


def share_of(rank: int, whole: Tensor) -> Tensor:
    """The samples [samples / 2, ...] of one of two ranks."""
    return whole.tensor_split(2)[rank]


def plain(
    loss: str, samples: int, share: Callable[[Tensor], Tensor] = lambda one: one
) -> list[float]:
    model = Clamped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(NUM_STEPS):
        inputs, targets = map(share, batch(step, samples))
        optimizer.zero_grad()
        measured = LOSSES[loss](model(inputs), targets)
        value = measured[0] / measured[1] if isinstance(measured, tuple) else measured
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


PLANS = [
    "dp1",
    "mb3",
    "dp2",
    "dp2:ring mb2",
    "dp2:zero1",
    "dp2:zero2 mb2",
    "dp2:zero3",
    "tp2",
    "pp2:1f1b mb2",
    "pp2:zbv mb4",
    "dp2 pp2:gpipe mb2",
]


@pytest.mark.parametrize("samples", [12, 7])
@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("plan", PLANS)
def test_a_clamp_works_on_the_gradient_of_the_mean_loss(
    ranks: Run, plan: str, loss: str, samples: int
) -> None:
    expected = plain(loss, samples)
    for found in ranks(Plan.parse(plan).world_size, trained, plan, loss, samples, plan=plan):
        assert found == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_rank_that_steps_by_itself_clamps_the_gradient_of_its_own_mean(
    ranks: Run, loss: str
) -> None:
    plan = "dp2:local,every3"
    for rank, found in enumerate(ranks(2, trained, plan, loss, 12, plan=plan)):
        own = plain(loss, 12, partial(share_of, rank))
        assert found[:2] == pytest.approx(own[:2], rel=TOLERANCE)  # the third is of both ranks


def test_the_clamp_bites() -> None:
    model = Clamped()
    inputs, targets = batch(0, 12)
    free = [
        torch.autograd.grad(scale * mean(model(inputs), targets), model.layers[0].weight)[0] / scale
        for scale in (1.0, 12.0)
    ]
    assert (free[0] - free[1]).abs().max() > 0.1 * free[1].abs().max()
