"""Engines whose optimizers have two sets of weights, and what one device makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.comm import World
from plait.engine.build import build
from plait.engine.engine import Engine
from plait.engine.options import Options
from plait.models import losses
from plait.plan import Plan
from tests.parity.families import SPLIT_FAMILIES
from tests.parity.harness import SEED, TOLERANCE, _copies, join

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Plainly = Callable[[], tuple[list[float], nn.Module]]
"""The losses of steps and evaluations on one device, and the model that is evaluated."""
AFTER = ["dp1", "dp2:zero3", "tp2", "pp2:1f1b mb2"]
EVEN = SPLIT_FAMILIES["gpt"]  # its sizes are what every tensor mode divides
_LONG = [
    *("mb2", "dp2", "dp2:ring", "dp2:server", "dp2:zero2", "dp2:zero3 mb2", "dp3:zero1"),
    *("tp2:1d,sp", "tp4:2d", "cp2", "pp2:1f1b mb2", "pp2:zbv mb4", "pp2 dp2:zero1"),
]
PLANS = [
    *("dp1", "dp2:zero1", "tp2 dp2:zero3"),
    *(pytest.param(plan, marks=pytest.mark.long) for plan in _LONG),
]


def made(world: World, plan: str, optimizer: MakeOptimizer) -> Engine:
    return build(
        EVEN.model(),
        Plan.parse(f"{plan} precision:float64"),
        loss=losses.cross_entropy,
        optimizer=optimizer,
        options=Options(seed=SEED),
        world=world,
    )


def share(world: World, batch: Any) -> Any:
    axis = world.axis("dp")
    return tuple(one.tensor_split(axis.size)[axis.rank] for one in batch)


def trained(world: World, plan: str, optimizer: MakeOptimizer) -> Any:
    """The losses of steps and of evaluations in turn, and the evaluated parameters."""
    engine = made(world, plan, optimizer)
    told = []
    for batch in EVEN.batches(8):
        told.append(engine.step(share(world, batch), trace=False).loss)
        told.append(engine.evaluate(share(world, batch)))
    return told, _copies(engine.local_parameters())


def first_steps(world: World, plan: str, optimizer: MakeOptimizer, folder: Path) -> None:
    """Two steps, saved."""
    engine = made(world, plan, optimizer)
    for batch in EVEN.batches(8)[:2]:
        engine.step(share(world, batch), trace=False)
    engine.save(folder)


def other_steps(world: World, plan: str, optimizer: MakeOptimizer, folder: Path) -> Any:
    """All steps but two, from what was saved after these; the evaluated parameters."""
    engine = made(world, plan, optimizer)
    batches = EVEN.batches(8)
    engine.step(share(world, batches[2]), trace=False)  # what is loaded says its own mode
    engine.load(folder)
    for batch in batches[2:]:
        engine.step(share(world, batch), trace=False)
    engine.evaluate(share(world, batches[0]))
    return _copies(engine.local_parameters())


def equals_one_device(
    ranks: Callable[..., list[Any]], plan: str, optimizer: MakeOptimizer, plainly: Plainly
) -> None:
    results = ranks(Plan.parse(plan).world_size, trained, plan, optimizer, plan=plan)
    expected, model = plainly()
    assert all(told == pytest.approx(expected, rel=TOLERANCE) for told, _ in results)
    check(join([params for _, params in results]), model)


def goes_on(
    ranks: Callable[..., list[Any]],
    folder: Path,
    after: str,
    optimizer: MakeOptimizer,
    plainly: Plainly,
) -> None:
    """A checkpoint of dp2:zero1 goes on under the plan `after` as one device does."""
    ranks(2, first_steps, "dp2:zero1", optimizer, folder, plan="dp2")
    size = Plan.parse(after).world_size
    check(join(ranks(size, other_steps, after, optimizer, folder, plan=after)), plainly()[1])


def check(found: dict[str, Any], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        expected = parameter.detach()
        scale = max(float(expected.abs().max()), 1e-2)
        error = float((found[name].view_as(expected) - expected).abs().max()) / scale
        assert error <= TOLERANCE, (name, error)
