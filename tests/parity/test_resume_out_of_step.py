"""Ranks that do not step together, saved and gone on with: also with fewer or more ranks, between
two rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm import World
from plait.engine.build import Options, build
from plait.models.losses import cross_entropy
from plait.outer import Asynchrony
from tests.parity.families import FAMILIES
from tests.parity.harness import SEED, join, optimizer

Run = Callable[..., list[Any]]
DILOCO = Asynchrony(outer_lr=0.7, outer_momentum=0.9)


EIGHT = Asynchrony(outer_lr=0.7, outer_momentum=0.9, compress="int8")


def train(
    world: World,
    plan: str,
    first: int,
    last: int,
    paths: tuple[str | None, str | None],
    halves: bool = False,
    asynchrony: Asynchrony = DILOCO,
) -> Any:
    """Steps [first, last); with `halves` it also saves half way, which ends a round there."""
    load, save = paths
    engine = build(
        FAMILIES["gpt"].model(),
        f"{plan} precision:float64",
        loss=cross_entropy,
        optimizer=optimizer,
        options=Options(seed=SEED, asynchrony=asynchrony),
        world=world,
    )
    if load is not None:
        engine.load(load)
        assert engine.step_index == first
    axis = world.axis("dp")
    for step in range(first, last):
        inputs, targets = FAMILIES["gpt"]._batch(8, torch.Generator().manual_seed(step))
        engine.step(
            (inputs.tensor_split(axis.size)[axis.rank], targets.tensor_split(axis.size)[axis.rank]),
            trace=False,
        )
        if halves and step + 1 == (first + last) // 2:
            engine.save(f"{save}-half")
    engine.save(save) if save is not None else engine.driver.synchronize()
    return [
        (p.name, p.global_shape, p.index(), p.values.clone()) for p in engine.local_parameters()
    ]


def whole(results: list[Any]) -> dict[str, Tensor]:
    return join(results)


@pytest.mark.parametrize(
    "asynchrony", [pytest.param(DILOCO, marks=pytest.mark.long), EIGHT], ids=["exact", "eight bits"]
)
def test_a_run_goes_on_where_it_stopped(ranks: Run, tmp_path: Path, asynchrony: Asynchrony) -> None:
    """With the momentum of the outer step and the mean of the inner optimizers; a save ends a
    round, so both runs save.
    """
    plan = "dp2:local,every2"
    saved = str(tmp_path / "saved")
    truth = whole(
        ranks(2, train, plan, 0, 6, (None, str(tmp_path / "truth")), True, asynchrony, plan=plan)
    )
    ranks(2, train, plan, 0, 3, (None, saved), False, asynchrony, plan=plan)
    again = whole(ranks(2, train, plan, 3, 6, (saved, None), False, asynchrony, plan=plan))
    for name, value in truth.items():
        assert torch.equal(again[name], value), name


def gone_back(world: World, path: str, steps: int) -> Any:
    """Two steps from a checkpoint that is loaded after `steps` others."""
    torch.manual_seed(0)
    engine = build(
        torch.nn.Linear(4, 3),
        "dp2:local,every2 precision:float64",
        loss=torch.nn.functional.cross_entropy,
        optimizer=optimizer,
        options=Options(seed=SEED, asynchrony=EIGHT),
        world=world,
    )
    if not steps:
        engine.save(path)
    for step in [*range(steps), -1, 0, 1]:
        if step < 0:
            engine.load(path)
            continue
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        targets = torch.randint(0, 3, (4,), generator=generator)
        engine.step((torch.rand(4, 4, generator=generator).double(), targets), trace=False)
    engine.driver.synchronize()
    return [
        (p.name, p.global_shape, p.index(), p.values.clone()) for p in engine.local_parameters()
    ]


def test_a_load_forgets_what_eight_bits_have_kept_back(ranks: Run, tmp_path: Path) -> None:
    """Rounding errors of a round before the load are no errors of the loaded parameters."""
    path, plan = str(tmp_path / "saved"), "dp2:local,every2"
    truth = whole(ranks(2, gone_back, path, 0, plan=plan))
    again = whole(ranks(2, gone_back, path, 2, plan=plan))
    for name, value in truth.items():
        assert torch.equal(again[name], value), name


@pytest.mark.parametrize(
    "plans",
    [
        (
            "dp2:local,every2",
            "dp3:local,every2",
            "dp1",
        ),  # a rank joins between rounds; then all but one leave
        ("dp4:async-server,stale2", "dp2:async-server,stale4", "dp2:zero1"),
        pytest.param(
            ("dp2", "dp2:local,every3", "dp2:async-server,stale1"), marks=pytest.mark.long
        ),
    ],
)
def test_ranks_leave_and_join_and_plans_change(
    ranks: Run, tmp_path: Path, plans: tuple[str, ...]
) -> None:
    previous: str | None = None
    for number, plan in enumerate(plans):
        target = str(tmp_path / f"saved-{number}")
        results = ranks(
            int(plan[2]), train, plan, 2 * number, 2 * number + 2, (previous, target), plan=plan
        )
        params = whole(results)
        reloaded = whole(
            ranks(1, train, "dp1", 2 * number + 2, 2 * number + 2, (target, None), plan="dp1")
        )
        assert all(torch.equal(params[name], reloaded[name]) for name in params)
        previous = target
