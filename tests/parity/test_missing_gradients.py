"""Results that cross a cut and get no gradient: what made them has none, as on one device.

AdamW moves a parameter whose gradient is zero, and leaves one alone that has none.
"""

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
from plait.plan import Plan
from tests.parity.harness import TOLERANCE, join

Run = Callable[..., list[Any]]
Batches = list[tuple[Tensor, Tensor]]


class BesideTheLoss(nn.Module):
    """Four layers, and a head on the first that the loss does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def trunk(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[samples, 4] -> the head's numbers and those of the trunk, both [samples, 4]."""
        first = self.layers[0](x).tanh()
        head = self.layers[1](first)
        for layer in self.layers[2:]:
            first = layer(first).tanh()
        return head, first


class Detached(BesideTheLoss):
    """Reads the numbers of its first head, without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> [samples, 4]."""
        head, y = self.trunk(x)
        return y * head.detach()


class LeftOut(BesideTheLoss):
    """Returns its first head too, which the loss does not read."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[samples, 4] -> [samples, 4], twice."""
        head, y = self.trunk(x)
        return y, head


class NowAndThen(BesideTheLoss):
    """Trains its head by samples of a certain kind alone."""

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 4] -> [samples, 4]."""
        head, y = self.trunk(x)
        return y + head if x[0, 0] > 0 else y + head.detach()


def loss_of(output: Any, target: Tensor) -> Tensor:
    """The squared error of the (first) output."""
    return F.mse_loss(output[0] if isinstance(output, tuple) else output, target)


def optimizer(params: Any) -> torch.optim.Optimizer:
    """One that moves parameters whose gradient is zero."""
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)


def alone(model: nn.Module, batches: Batches, slices: int = 1) -> dict[str, Tensor]:
    """The parameters after a plain loop, which runs each batch in as many slices."""
    update = optimizer(model.parameters())
    for x, target in batches:
        update.zero_grad()
        for own, wanted in zip(x.chunk(slices), target.chunk(slices), strict=True):
            (loss_of(model(own), wanted) / slices).backward()
        update.step()
    return {name: param.detach().flatten() for name, param in model.named_parameters()}


def trained(world: World, model: nn.Module, plan: str, batches: Batches) -> list[Any]:
    """A rank's parts of the parameters after as many steps."""
    engine = plait.build(
        copy.deepcopy(model),
        f"{plan} precision:float64",
        loss=loss_of,
        optimizer=optimizer,
        options=plait.Options(blocks="layers.*"),
        world=world,
    )
    axis = world.axis("dp")
    for batch in batches:
        engine.step(tuple(part.tensor_split(axis.size)[axis.rank] for part in batch), trace=False)
    return [
        (part.name, part.global_shape, part.index(), part.values.detach().clone())
        for part in engine.local_parameters()
    ]


def drawn(signs: tuple[int, ...]) -> Batches:
    """A batch for each sign, which the first number of its samples has."""
    draw = torch.Generator().manual_seed(1)
    batches = []
    for sign in signs:
        x, target = (torch.randn((8, 4), generator=draw, dtype=torch.float64) for _ in range(2))
        x[:, 0] = x[:, 0].abs() * sign
        batches.append((x, target))
    return batches


PLANS = (
    "pp2 mb2",
    "pp4:1f1b mb4",
    "pp2:interleaved,v2 mb2",
    "pp2:zbv mb2",
    "pp2 dp2:zero3 mb2",
    "pp2 remat:full mb2",
)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [Detached, LeftOut, NowAndThen])
def test_what_gets_no_gradient_stays_as_it_is(
    ranks: Run, kind: type[BesideTheLoss], plan: str
) -> None:
    torch.manual_seed(3)
    model = kind().double()
    batches = drawn((-1, -1, 1, -1))
    wanted = alone(copy.deepcopy(model), batches)
    parts = ranks(Plan.parse(plan).world_size, trained, model, plan, batches, plan=plan)
    found = join(parts)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "plan", ["pp2 dp2:zero3", "pp2 dp2:zero3 mb2", "pp2:zbv dp2:zero3 mb2", "pp2 tp2 dp2 mb2"]
)
def test_one_data_rank_may_have_a_gradient_alone(ranks: Run, plan: str) -> None:
    torch.manual_seed(3)
    model = NowAndThen().double()
    batches = drawn((-1, -1, -1))
    for x, _ in batches:
        x[:4, 0] *= -1  # the samples of the first data rank
    parsed = Plan.parse(plan)
    wanted = alone(copy.deepcopy(model), batches, 2 * parsed.micro_batches)
    parts = ranks(parsed.world_size, trained, model, plan, batches, plan=plan)
    found = join(parts)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)
