"""Unequal shares of samples along dp, against one device: the loss is a mean over all samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from plait.comm import World
from plait.config import load
from plait.engine.prepare import share
from plait.errors import PlanError
from plait.plan import Plan
from plait.predict import planner
from plait.predict.cost import estimate
from plait.run.assemble import Training, assemble
from plait.verify.run import PROBES, in_world, problem_of
from plait.verify.run import VerifyTask as Task
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE, check

Run = Callable[..., list[Any]]

CELLS = [
    ("dp2", "gpt", (3, 1)),
    ("dp2:ring mb2", "gpt", (1, 2)),
    ("dp3:server", "mlp", (3, 2, 1)),
    ("dp2:zero1 mb3", "gpt", (3, 1)),
    ("dp3:zero2 mb2", "llama", (1, 3, 2)),
    ("dp2:zero3", "llama", (1, 5)),
    ("dp4:zero3,replicate2", "gpt", (4, 1, 6, 1)),
    ("pp2:1f1b dp2:zero1 mb3", "gpt", (1, 3)),
    ("pp2:zbv dp2 mb2", "gpt-deep", (2, 1)),
    ("tp2:1d,sp dp2", "split-llama", (3, 1)),
    ("tp4:2d dp2:zero1", "split-gpt", (1, 2)),
    ("cp2:ring dp2:zero3", "long-llama", (3, 1)),
    ("ep2 dp2 mb2", "mixtral-balanced", (1, 2)),
    ("ep2 dp2:zero2", "deepseek-by-sequence", (3, 1)),
]


@pytest.mark.parametrize(("plan", "family", "shares"), CELLS, ids=str)
def test_equals_one_device(ranks: Run, plan: str, family: str, shares: tuple[int, ...]) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, shares=shares)
    assert outcome.largest <= TOLERANCE, outcome


CONFIG: dict[str, Any] = {
    "model": {
        "name": "gpt",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 16,
    },
    "data": {"name": "random", "seq_len": 8, "num_samples": 44},
    "train": {"global_batch": 8, "lr": 0.01, "seed": 3},
    "plan": {"shares": [3, 1]},
}


def test_is_proven_with_uneven_tokens_and_a_short_last_batch(ranks: Run) -> None:
    """`plait verify` cuts the batch by shares itself, and asks the loader nothing."""
    problem = problem_of(load(CONFIG))
    probes = ("adamw", "uneven-tokens", "last-batch")
    assert set(probes) <= set(PROBES)
    task = Task(problem, "dp2:zero1 mb2 precision:float64", 2, None, probes)
    reports = ranks(2, in_world, task, plan="dp2")
    assert all(report.ok for report in reports), reports[0].text()


def run(world: World, plan: str, shares: Sequence[int], folder: Path, step: int) -> list[float]:
    """The losses of six steps in two halves, saved by the one and loaded by the other."""
    config = load({**CONFIG, "plan": {"shares": list(shares)}})
    training: Training = assemble(config, Plan.parse(f"{plan} precision:float64"), world)
    engine, loader = training.engine, training.loader
    if step:
        loader.load_state_dict(engine.load(folder)["loader"], step)
    losses = [engine.step(next(loader), trace=False).loss for _ in range(3)]
    if not step:
        engine.save(folder, loader=loader.state_dict())
    return losses


@pytest.mark.parametrize("after", [("dp1", (3, 1)), ("dp2", ()), ("dp2:zero3", (1, 3))], ids=str)
def test_goes_on_without_and_with_other_shares(
    ranks: Run, tmp_path: Path, after: tuple[str, tuple[int, ...]]
) -> None:
    alone = [
        loss
        for step in (0, 3)
        for loss in ranks(1, run, "dp1", (), tmp_path / "alone", step, plan="dp1")[0]
    ]
    first = ranks(2, run, "dp2:zero1", (3, 1), tmp_path / "saved", 0, plan="dp2")[0]
    size = Plan.parse(after[0]).world_size
    second = ranks(size, run, *after, tmp_path / "saved", 3, plan=after[0])[0]
    assert [*first, *second] == pytest.approx(alone, rel=TOLERANCE)


def parts(world: World, loader: Any) -> list[int]:
    return [len(inputs) for inputs, _ in share(loader, world, (3, 1))]


def test_any_loader_is_shared_by_shares() -> None:
    data = TensorDataset(torch.arange(20.0)[:, None], torch.arange(20))
    for loader in (DataLoader(data, batch_size=8), list(DataLoader(data, batch_size=8))):
        assert threaded(2, parts, loader, plan="dp2") == [[6, 6, 3], [2, 2, 1]]


def test_the_estimate_is_of_the_largest_share() -> None:
    """A step of shares [3, 1] takes what one of equal shares takes with half as many samples
    more."""
    cluster = "a100-80gbx2"
    tables = {**CONFIG, "train": {"global_batch": 64}}
    even = {**tables, "plan": {}, "train": {"global_batch": 96}}
    uneven = estimate(tables, "dp2", cluster)
    alike = estimate(even, "dp2", cluster)
    assert uneven.step_seconds == alike.step_seconds and uneven.memory == alike.memory
    assert uneven.tokens == 64 * 8
    with pytest.raises(PlanError, match="has 2 numbers and dp4 needs 4"):
        estimate(tables, "dp4", "a100-80gbx4")
    plans = planner.choose(tables, cluster, top=100)
    found = next(one for one in plans if str(one.plan).startswith("dp2 "))
    priced = estimate(tables, found.plan, cluster)
    assert found.step_seconds == pytest.approx(priced.step_seconds)
