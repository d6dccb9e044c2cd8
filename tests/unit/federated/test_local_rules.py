"""What clients cannot train as it is written, and how far a round is."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config import load
from plait.errors import ConfigError
from plait.outer.federated import progress
from plait.outer.federated.client import LocalOptions
from plait.outer.federated.local_rules import check_local_training


def tables(**train: Any) -> dict[str, Any]:
    return {
        "model": {
            "name": "mlp",
            "in_features": 64,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "out_features": 10,
        },
        "data": {"name": "digits"},
        "train": {"optimizer": "sgd", "lr": 0.1, **train},
    }


@pytest.mark.parametrize("train", [{"schedule": "cosine"}, {"warmup_steps": 3}])
def test_a_schedule_over_steps_is_refused(train: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a client starts again in every round"):
        check_local_training(load(tables(**train)))


@pytest.mark.parametrize("train", [{"optimizer": "adamw"}, {"momentum": 0.9}])
def test_scaffold_takes_plain_sgd_alone(train: dict[str, Any]) -> None:
    check_local_training(load(tables(**train)))
    with pytest.raises(ConfigError, match="use optimizer 'sgd' with momentum 0"):
        check_local_training(load(tables(**train), ["federated.strategy=scaffold"]))


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
