"""Clients that share an engine: each trains as if it had one of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import datasets
from plait.comm import World
from plait.config import Config, load
from plait.engine.seeds import derive_seed
from plait.outer.federated import client as client_module
from plait.outer.federated.messages import TrainTask
from plait.outer.federated.simulation import LocalFleet, ServerData, make_server
from plait.plan import Plan
from plait.run import assemble
from tests.federated.test_simulation import config, fill, rounds_on

Run = Callable[..., list[Any]]


class Centred(nn.Module):
    """Batch norm, and a running mean that is taken off in training too."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 10)
        self.register_buffer("running", torch.zeros(16))

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.first(input)
        if self.training:
            self.running.lerp_(hidden.detach().mean(dim=0), 0.1)
        return self.last(torch.relu(self.norm(hidden) - self.running))


def centred() -> nn.Module:
    return Centred()


def settings_of(*overrides: str, plan: str = "dp1") -> Config:
    tables = {
        "model": {"python": f"{__name__}:centred"},
        "data": {"name": "digits"},
        "train": {"global_batch": 64, "optimizer": "sgd", "lr": 0.2},
        "plan": {"text": f"{plan} precision:float64"},
        "federated": {"rounds": 2, "clients": 4, "partition": "iid", "local_epochs": 2},
    }
    return load(tables, overrides)


def plain_loop(settings: Config) -> Tensor:
    """FedAvg over copies of the new model, which are independent of each other."""
    seed = settings.train.seed
    new = assemble.make_model(assemble.model_keys(settings), seed).double()
    parts = [samples.train for samples in ServerData(settings).samples]
    weights = flat(new)
    for number in range(1, settings.federated.rounds + 1):
        total = torch.zeros_like(weights)
        for client, part in enumerate(parts):
            model = deepcopy(new)
            fill([param for _, param in sorted(model.named_parameters())], weights)
            optimizer = torch.optim.SGD(model.parameters(), settings.train.lr)
            order = derive_seed(seed, "client", client, number) % 2**31
            loader = datasets.Loader(part, settings.train.global_batch, seed=order)
            for _ in range(settings.federated.local_epochs * loader.batches_per_epoch):
                inputs, targets = next(loader)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs.double()), targets).backward()
                optimizer.step()
            total.add_(flat(model) - weights, alpha=len(part))
        weights = weights + total / sum(map(len, parts))
    return weights


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for _, param in sorted(model.named_parameters())])


def test_clients_with_buffers_equal_copies_of_the_model(ranks: Run) -> None:
    settings = settings_of()
    weights, _ = ranks(1, rounds_on, settings)[0]
    expected = plain_loop(settings)
    assert (weights - expected).abs().max() <= 1e-12 * expected.abs().max()


def changes(world: World, settings: Config, order: Sequence[int]) -> tuple[Tensor, Any]:
    """Client 0's change and what it keeps, after clients have trained in an order."""
    fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world)
    weights = fleet.initial()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the forward (computes buffers|carries)")  # and meant so
        found = {client: fleet.train(TrainTask(1, weights), [client])[0] for client in order}
    return found[0].change, fleet.samples[0].kept.scale


@pytest.mark.parametrize("plan", ["dp1", "dp2", "pp2 mb2"])
def test_a_client_depends_on_no_other_that_came_before(ranks: Run, plan: str) -> None:
    settings = settings_of(plan=plan)
    count = Plan.parse(plan).world_size
    alone, _ = ranks(count, changes, settings, [0], plan=plan)[0]
    last, _ = ranks(count, changes, settings, [1, 2, 0], plan=plan)[0]
    assert torch.equal(alone, last)


def test_each_client_has_a_loss_scale_of_its_own(ranks: Run) -> None:
    settings = config("train.float16=true", "federated.local_epochs=20", plan="dp1")
    alone, scale = ranks(1, changes, settings, [0])[0]
    last, same = ranks(1, changes, settings, [1, 2, 0])[0]
    assert scale["mean_loss_scale"][1] > 0 and scale == same
    assert torch.equal(alone, last)


def refused_once(world: World) -> list[tuple[int, ...]]:
    """Who answers in two rounds of SCAFFOLD, where client 1's change is no number in the first."""
    settings = config("federated.strategy=scaffold")
    fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world)
    server = make_server(settings, fleet.initial())
    answered = []
    for number in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            if number == 1:
                patch.setattr(
                    client_module, "get_weights", spoilt_second(client_module.get_weights)
                )
            answered.append(server.round(fleet, number).answered)
    return answered


def spoilt_second(read: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """A reading of weights whose second result is no number."""
    calls = []

    def reading(engine: Any) -> Tensor:
        calls.append(engine)
        return read(engine) * (float("nan") if len(calls) == 2 else 1.0)

    return reading


def test_a_refused_reply_moves_no_control(ranks: Run) -> None:
    assert ranks(1, refused_once)[0] == [(0, 2, 3), (0, 1, 2, 3)]
