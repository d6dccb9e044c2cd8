"""Learning rates of rounds: a schedule goes over the rounds, whoever trains in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm import World
from plait.config import Config
from plait.outer.federated.messages import TrainTask
from plait.outer.federated.samples import ClientState
from plait.outer.federated.simulation import LocalFleet
from plait.plan import Plan
from tests.federated.test_simulation import config, reference, rounds_on

Run = Callable[..., list[Any]]
WARM_COSINE = (
    "federated.rounds=5",
    "train.schedule=cosine",
    "train.min_lr=0.01",
    "train.steps=50",
    "train.warmup_steps=20",
)


def warm_cosine() -> list[float]:
    """The rates of `WARM_COSINE` by hand.

    The warm-up takes 20 of 50 steps, which is two of five rounds; the others go down to 0.01.
    """
    course = [0.5 * (1 + math.cos(math.pi * part / 3)) for part in range(3)]
    return [0.1, 0.2, *(0.01 + 0.19 * height for height in course)]


def test_all_clients_of_a_round_train_with_its_rate(ranks: Run) -> None:
    settings = config(*WARM_COSINE)
    weights, _ = ranks(1, rounds_on, settings)[0]
    expected = reference(settings, warm_cosine())
    assert (weights - expected).abs().max() <= 1e-12 * expected.abs().max()


def rates_of(world: World, settings: Config, order: Sequence[int]) -> list[set[float]]:
    """The learning rates of every step of these clients, by round."""
    fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world)
    groups = fleet.client.engine.update.optimizer.param_groups
    seen: list[set[float]] = []
    for number in range(1, settings.federated.rounds + 1):
        seen.append(set())
        for client in order:
            rates = seen[-1]
            fleet.client.run(
                TrainTask(number, fleet.initial()),
                fleet.samples[client],
                lambda rates=rates: rates.update(group["lr"] for group in groups),
            )
    return seen


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1), (2,)])
def test_the_rate_of_a_round_is_that_of_any_clients(ranks: Run, order: tuple[int, ...]) -> None:
    seen = ranks(1, rates_of, config(*WARM_COSINE), order)[0]
    assert all(len(rates) == 1 for rates in seen)
    assert [rates.pop() for rates in seen] == pytest.approx(warm_cosine(), rel=1e-12)


def controls(world: World, settings: Config) -> list[Tensor]:
    """What moves SCAFFOLD's control in one step from the same weights, by round."""
    fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world)
    weights = fleet.initial()
    moved = []
    for number in range(1, settings.federated.rounds + 1):
        fleet.samples[0].kept = ClientState()
        task = TrainTask(number, weights, {"control": torch.zeros_like(weights)})
        moved.append(fleet.train(task, [0])[0].extra["control"])
    return moved


def test_scaffold_finds_the_gradient_at_any_rate(ranks: Run) -> None:
    over = ("federated.strategy=scaffold", "federated.local_epochs=1", "train.global_batch=2000")
    first, *others = ranks(1, controls, config(*WARM_COSINE, *over))[0]
    assert first.abs().max() > 1e-4
    for moved in others:
        assert (moved - first).abs().max() <= 1e-10 * first.abs().max()
