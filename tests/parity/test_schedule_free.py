"""Optimizers with two sets of weights: one for steps, one for evaluations and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import build
from plait.engine.engine import Engine
from plait.engine.options import Options
from plait.engine.weight_modes import check_modes
from plait.errors import OptimizerError
from plait.models import losses
from plait.plan import Plan
from tests.parity.families import SPLIT_FAMILIES, Family
from tests.parity.harness import SEED, TOLERANCE, _copies, join, whole_model

Run = Callable[..., list[Any]]
EVEN = SPLIT_FAMILIES["gpt"]
QUICK = ["dp1", "dp2:zero1", "tp2 dp2:zero3"]
OTHERS = [
    *("mb2", "dp2", "dp2:ring", "dp2:server", "dp2:zero2", "dp2:zero3 mb2", "dp3:zero1"),
    *("tp2:1d,sp", "tp4:2d", "cp2", "pp2:1f1b mb2", "pp2:zbv mb4", "pp2 dp2:zero1"),
]


def schedule_free(params: Iterable[nn.Parameter]) -> Any:
    # An eps above rounding: gradients of key biases are zero but for the order of sums.
    return schedulefree.AdamWScheduleFree(
        params, lr=0.02, betas=(0.8, 0.99), eps=1e-5, weight_decay=0.1, warmup_steps=3
    )


def made(world: World, plan: str, family: Family = EVEN) -> Engine:
    return build(
        family.model(),
        Plan.parse(f"{plan} precision:float64"),
        loss=losses.cross_entropy,
        optimizer=schedule_free,
        options=Options(seed=SEED),
        world=world,
    )


def share(world: World, batch: Any) -> Any:
    axis = world.axis("dp")
    return tuple(one.tensor_split(axis.size)[axis.rank] for one in batch)


def trained(world: World, plan: str) -> Any:
    """The evaluated loss after each step but the first, and the evaluated parameters."""
    engine = made(world, plan)
    evaluated = []
    for number, batch in enumerate(EVEN.batches(8)):
        engine.step(share(world, batch), trace=False)
        if number:
            evaluated.append(engine.evaluate(share(world, batch)))
    return evaluated, _copies(engine.local_parameters())


def plainly() -> tuple[list[float], nn.Module]:
    model = whole_model(EVEN)
    optimizer = schedule_free(model.parameters())
    evaluated = []
    for number, (inputs, targets) in enumerate(EVEN.batches(8)):
        optimizer.train()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number:
            optimizer.eval()
            with torch.no_grad():
                outputs = model(inputs)
            evaluated.append(float(F.cross_entropy(outputs.flatten(0, -2), targets.flatten())))
    return evaluated, model


def check(found: dict[str, Any], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        expected = parameter.detach()
        scale = max(float(expected.abs().max()), 1e-2)
        error = float((found[name].view_as(expected) - expected).abs().max()) / scale
        assert error <= TOLERANCE, (name, error)


@pytest.mark.parametrize(
    "plan", [*QUICK, *(pytest.param(one, marks=pytest.mark.long) for one in OTHERS)]
)
def test_both_sets_of_weights_equal_one_device(ranks: Run, plan: str) -> None:
    results = ranks(Plan.parse(plan).world_size, trained, plan, plan=plan)
    expected, model = plainly()
    assert all(one == pytest.approx(expected, rel=TOLERANCE) for one, _ in results)
    check(join([params for _, params in results]), model)


def halves(world: World, plan: str, folder: Path, first: bool) -> Any:
    """Half of the steps, saved; or the other half of them, from what was saved."""
    engine = made(world, plan)
    batches = EVEN.batches(8)
    if not first:
        engine.load(folder)
    for batch in batches[:2] if first else batches[2:]:
        engine.step(share(world, batch), trace=False)
    if first:
        engine.save(folder)
    engine.evaluate(share(world, batches[0]))
    return _copies(engine.local_parameters())


@pytest.mark.parametrize("after", ["dp1", "dp2:zero3", "tp2", "pp2:1f1b mb2"])
def test_a_checkpoint_goes_on_under_another_plan(ranks: Run, tmp_path: Path, after: str) -> None:
    ranks(2, halves, "dp2:zero1", tmp_path / "saved", True, plan="dp2")
    size = Plan.parse(after).world_size
    results = ranks(size, halves, after, tmp_path / "saved", False, plan=after)
    check(join(results), plainly()[1])


APART = ["dp2:local,every8", "dp2:async-server,stale2", "pp2:pipedream mb4"]


@pytest.mark.parametrize("plan", APART)
def test_ranks_that_do_not_step_together_refuse_it(plan: str) -> None:
    optimizer = schedule_free([nn.Parameter(torch.zeros(2))])
    with pytest.raises(OptimizerError, match=r"AdamWScheduleFree has train.*weights of all ranks"):
        check_modes(optimizer, Plan.parse(plan))


class WithoutNote(torch.optim.SGD):
    """An optimizer whose groups do not say which weights are in place."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize("plan", ["dp1", "dp1:zero1"])
def test_the_groups_of_an_optimizer_say_its_mode(plan: str) -> None:
    def silent(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return WithoutNote(params, lr=0.1)

    with pytest.raises(OptimizerError, match="no number in its param_groups says"):
        build(EVEN.model(), plan, loss=losses.cross_entropy, optimizer=silent)
