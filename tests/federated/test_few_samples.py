"""Clients and servers with few samples, or with none to be judged by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.cli import main
from plait.comm import World
from plait.config import Federated, load
from plait.outer.federated.simulation import ServerData
from plait.outer.federated.split import split
from tests.federated.test_simulation import config, reference, rounds_on

Run = Callable[..., list[Any]]


class Targets:
    """Samples with these targets."""

    def __init__(self, targets: Tensor) -> None:
        self._targets = targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), self._targets[index]


def model() -> nn.Module:
    return nn.Linear(4, 2)


def few() -> Targets:
    return Targets(torch.tensor([0, 1, 0]))


def masked() -> Targets:
    """Those that clients are judged by have no targets."""
    targets = torch.ones(40, dtype=torch.int64)
    dealt = split(Targets(targets), Federated(clients=2), 0)
    for own in dealt.own_test:
        targets[own] = -100
    return Targets(targets)


def tables(data: str) -> dict[str, Any]:
    return {
        "model": {"python": f"{__name__}:model"},
        "data": {"python": f"{__name__}:{data}"},
        "federated": {"clients": 2, "rounds": 1},
    }


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("few", "accuracy      none: the server holds out no targets"),
        ("masked", "on samples that the server holds out\ntraffic"),
    ],
)
def test_without_targets_there_is_no_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str, said: str
) -> None:
    settings = load(tables(data))
    path = tmp_path / "config.toml"
    path.write_text(settings.to_toml())
    server = ServerData(settings)
    weights = server.evaluator.initial()
    own = [server.evaluator.accuracy(weights, samples.test) for samples in server.samples]
    assert (server.accuracy(weights) is None) is (data == "few")
    assert (own == [None, None]) is (data == "masked")
    assert main(["federated", str(path)]) == 0
    assert said in capsys.readouterr().out


def skewed(world: World) -> tuple[list[int], Tensor, Tensor]:
    settings = config(
        "federated.clients=12", "federated.partition=quantity", "federated.alpha=0.25"
    )
    weights, _ = rounds_on(world, settings)
    sizes = [len(samples.train) for samples in ServerData(settings).samples]
    return sizes, weights, reference(settings)


def test_clients_of_one_sample_and_of_hundreds_equal_a_plain_loop(ranks: Run) -> None:
    sizes, weights, expected = ranks(1, skewed)[0]
    assert min(sizes) == 1 and max(sizes) > 500
    assert torch.equal(weights, expected)
