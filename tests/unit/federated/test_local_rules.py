"""How clients train by `[train]`, what they cannot train, and how far a round is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from plait.comm import World
from plait.config import Config, load
from plait.engine.build import join_world
from plait.errors import ConfigError, RunError
from plait.outer.federated import progress
from plait.outer.federated.client import LocalOptions
from plait.outer.federated.local_rules import RoundRate, check_local_training
from plait.outer.federated.messages import TrainTask
from plait.outer.federated.simulation import LocalFleet
from plait.plan import Plan
from tests.federated.tables import DIGITS

COUNTING = "tests.unit.federated.test_local_rules:counting"


def tables(**train: Any) -> dict[str, Any]:
    return {
        **DIGITS,
        "train": {"optimizer": "sgd", "lr": 0.1, "global_batch": 256, **train},
        "federated": {"clients": 2},
    }


def factors(config: Config) -> list[float]:
    rate = RoundRate(config)
    found = []
    for number in range(1, config.federated.rounds + 1):
        rate.begin(number)
        found.append(rate(0))
        assert rate(1000) == found[-1]
    return found


@pytest.mark.parametrize(
    ("train", "rounds", "expected"),
    [
        ({}, 3, [1, 1, 1]),
        ({"schedule": "linear"}, 4, [1, 3 / 4, 1 / 2, 1 / 4]),
        ({"schedule": "linear", "min_lr": 0.05}, 2, [1, 3 / 4]),
        ({"schedule": "cosine"}, 2, [1, 1 / 2]),
        ({"schedule": "cosine"}, 1, [1]),
        ({"warmup_steps": 30, "steps": 100}, 10, [1 / 3, 2 / 3, *[1] * 8]),
        ({"warmup_steps": 31, "steps": 100}, 10, [1 / 4, 1 / 2, 3 / 4, *[1] * 7]),
        ({"warmup_steps": 1, "steps": 1000}, 2, [1, 1]),
    ],
)
def test_a_schedule_goes_over_the_rounds(
    train: dict[str, Any], rounds: int, expected: list[float]
) -> None:
    config = load(tables(**train), [f"federated.rounds={rounds}"])
    assert factors(config) == pytest.approx(expected)


def test_a_round_after_the_schedule_is_refused() -> None:
    RoundRate(load(tables(), ["federated.rounds=2"])).begin(3)
    with pytest.raises(RunError, match=r"round 3 comes after the 2 of federated\.rounds"):
        RoundRate(load(tables(schedule="cosine"), ["federated.rounds=2"])).begin(3)


class Counting(torch.optim.SGD):
    """SGD whose rate falls by the steps that its groups count."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 / group.setdefault("count", 1)
            group["count"] += 1
        super().step()


def counting(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return Counting(params, lr=0.1)


@pytest.mark.parametrize("train", [{"optimizer": COUNTING}, {"optimizer": "adamw"}])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_client_learns_the_same_whoever_trained_before(
    world: World, train: dict[str, Any], dropout: float
) -> None:
    changes = []
    for order in ((0, 1), (1,)):
        config = load(tables(**train), [f"model.dropout={dropout}"])
        fleet = LocalFleet(config, Plan.parse("dp1"), world)
        replies = fleet.train(TrainTask(2, fleet.initial()), order)
        changes.append(replies[-1].change)
    assert torch.equal(*changes)


@pytest.fixture
def world() -> Iterable[World]:
    world = join_world(Plan.parse("dp1"))
    yield world
    world.close()


@pytest.mark.parametrize(
    "train",
    [
        {"optimizer": "adamw"},
        {"momentum": 0.9},
        {"clip_grad_norm": 1.0},
        {"groups": [{"match": "*", "lr": 0.2}]},
    ],
)
def test_scaffold_takes_plain_sgd_alone(train: dict[str, Any]) -> None:
    check_local_training(load(tables(**train)))
    with pytest.raises(ConfigError, match="use optimizer 'sgd' with momentum 0"):
        check_local_training(load(tables(**train), ["federated.strategy=scaffold"]))


@pytest.mark.parametrize("strategy", ["fedprox", "scaffold"])
@pytest.mark.parametrize("plan", ["pp2:pipedream", "pp2:2bw", "dp2:async-server,stale1"])
def test_corrections_need_gradients_of_the_newest_weights(strategy: str, plan: str) -> None:
    text = f"plan.text={plan}"
    check_local_training(load(tables(), [text]))
    with pytest.raises(ConfigError, match="gradients are of older weights"):
        check_local_training(load(tables(), [text, f"federated.strategy={strategy}"]))


def test_scaffold_takes_no_outer_step_but_the_mean() -> None:
    over = ["federated.strategy=scaffold", "plan.text=dp2:local,every2"]
    check_local_training(load(tables(), over))
    with pytest.raises(ConfigError, match="local's outer_lr is 1"):
        check_local_training(load(tables(outer_momentum=0.9), over))


def test_scaffold_takes_plain_sgd_with_a_schedule() -> None:
    check_local_training(load(tables(schedule="cosine"), ["federated.strategy=scaffold"]))


def test_a_long_round_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    round_progress = progress.Progress(2, LocalOptions(epochs=2, batch=16).num_steps(33))
    for _ in range(6):
        now[0] += 6.0
        round_progress.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "plait: round 2: step 2 of 6 of all clients, about 24 s left",
        "plait: round 2: step 4 of 6 of all clients, about 12 s left",
    ]
