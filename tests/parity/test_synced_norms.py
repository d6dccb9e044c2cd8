"""`nn.SyncBatchNorm` has the statistics of all ranks' samples of a micro-batch.

`BatchNorm` has them on one device that takes these samples together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.comm import World
from plait.errors import NotAvailable
from plait.plan import Plan
from tests.helpers.threaded import threaded
from tests.parity.harness import _copies, join

Run = Callable[..., list[Any]]
STEPS = 3
TOLERANCE = 1e-10
PLANS = [
    "dp2",
    "dp4:ring mb2",
    "dp2:zero3 mb2",
    "dp2 mb2 remat:full",
    "pp2:zb-h1 dp2:zero1 mb3",
    *[
        pytest.param(plan, marks=pytest.mark.long)
        for plan in (
            "dp2 mb2",
            "dp2:server",
            "dp2:zero1 mb2",
            "dp2:zero2 mb3",
            "dp2:zero3,replicate2 mb2",
            "pp2:1f1b dp2 mb2",
            "pp2:zbv dp2 mb4",
        )
    ],
]


def made() -> nn.Sequential:
    """Equal values on all ranks, which share torch's generator as threads."""
    blocks: list[nn.Module] = []
    for channels in (3, 4, 4, 4):
        blocks += [nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU()]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 25, 5)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(
                0.3 * torch.randn(param.shape, generator=generator, dtype=param.dtype) + 0.1
            )
    return model


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 3, 5, 5, generator=generator, dtype=torch.float64),
            torch.randint(5, (size,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def trained(world: World, plan: str, size: int) -> tuple[list[float], Any, dict[str, Tensor]]:
    """The losses, and at the end this rank's parts of the parameters, and its buffers."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(made())
    example = torch.zeros(2, 3, 5, 5, dtype=torch.float64)
    options = plait.Options(cutting=plait.Cutting(example=example))
    engine = plait.build(
        model,
        f"{plan} precision:float64",
        loss=F.cross_entropy,
        optimizer=sgd,
        world=world,
        options=options,
    )
    losses = []
    for inputs, targets in batches(size):
        axis = world.axis("dp")
        share = [one.tensor_split(axis.size)[axis.rank] for one in (inputs, targets)]
        losses.append(engine.step(tuple(share)).loss)
    return losses, _copies(engine.local_parameters()), dict(engine.model.named_buffers())


def expected(plan: Plan, size: int) -> tuple[list[float], nn.Module]:
    """The losses of one device that takes each micro-batch of all ranks at once, and its model."""
    model = made()
    optimizer = sgd(model.parameters())
    losses = []
    for inputs, targets in batches(size):
        ranks = torch.arange(size).tensor_split(plan.dp.size)
        parts = [rank.tensor_split(plan.micro_batches) for rank in ranks]
        total = 0.0
        for number in range(plan.micro_batches):
            rows = torch.cat([part[number] for part in parts])
            if not len(rows):
                continue
            loss = F.cross_entropy(model(inputs[rows]), targets[rows], reduction="sum") / size
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


def check(results: list[Any], plan: Plan, size: int) -> None:
    losses, model = expected(plan, size)
    for told, _, buffers in results:
        assert told == pytest.approx(losses, rel=TOLERANCE)
        for name, buffer in model.named_buffers():
            if name in buffers and plan.pp.size == 1:
                torch.testing.assert_close(buffers[name], buffer, rtol=TOLERANCE, atol=TOLERANCE)
    params = join([parts for _, parts, _ in results])
    for name, param in model.named_parameters():
        found = params[name].view_as(param)
        torch.testing.assert_close(found, param.detach(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("plan", PLANS)
def test_equals_one_device(plan: str) -> None:
    parsed = Plan.parse(plan)
    check(threaded(parsed.world_size, trained, plan, 12, plan=plan), parsed, 12)


@pytest.mark.parametrize(("plan", "size"), [("dp2", 1), ("dp2", 5), ("dp4:zero3 mb2", 5)])
def test_ranks_with_fewer_samples_or_none_take_part(plan: str, size: int) -> None:
    parsed = Plan.parse(plan)
    check(threaded(parsed.world_size, trained, plan, size, plan=plan), parsed, size)


def test_processes_equal_one_device(ranks: Run) -> None:
    check(ranks(2, trained, "dp2:zero3 mb2", 8, plan="dp2:zero3 mb2"), Plan.parse("dp2 mb2"), 8)


def compiled(world: World, plan: str) -> Any:
    warnings.simplefilter("ignore")  # of torch's own modules, which it imports to compile
    return trained(world, plan, 8)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp2 mb2 compile", "dp2 mb2 compile remat:full"])
def test_a_norm_that_is_a_block_is_no_graph(ranks: Run, plan: str) -> None:
    check(ranks(2, compiled, plan, plan=plan), Plan.parse(plan), 8)


def refused(world: World, plan: str) -> str:
    with pytest.raises(NotAvailable) as caught:
        trained(world, plan, 4)
    return str(caught.value)


@pytest.mark.parametrize("plan", ["tp2", "dp2:local,every2", "dp2:async-server,stale2"])
def test_other_plans_are_refused_with_the_cure(plan: str) -> None:
    for said in threaded(2, refused, plan, plan=plan):
        assert "'1' (SyncBatchNorm)" in said
        assert "take GroupNorm" in said
