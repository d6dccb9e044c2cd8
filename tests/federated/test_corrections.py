"""What FedProx and SCAFFOLD add to gradients: equal to a plain loop that has it in its loss.

The model has a branch that some steps do not use, and the norm that clips is of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import datasets
from plait.config import Config, load
from plait.engine.seeds import derive_seed
from plait.outer.federated.samples import Subset
from plait.outer.federated.simulation import ServerData
from plait.run import assemble
from tests.federated.test_one_engine import changes, flat
from tests.federated.test_simulation import config, fill, rounds_on

Run = Callable[..., list[Any]]
MU = 0.5


class Branching(nn.Module):
    """A second layer for batches whose first sample has a certain bright pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.branch = nn.Linear(8, 8)
        self.last = nn.Linear(8, 10)

    def forward(self, input: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(input))
        if bool(input[0, 20] > 0.5):
            hidden = hidden + self.branch(hidden)
        return self.last(hidden)


def branching() -> nn.Module:
    return Branching()


def settings_of(*overrides: str, plan: str = "dp1") -> Config:
    tables = {
        "model": {"python": f"{__name__}:branching"},
        "data": {"name": "digits"},
        "train": {"global_batch": 64, "optimizer": "sgd", "lr": 0.2},
        "plan": {"text": f"{plan} precision:float64"},
        "federated": {"rounds": 2, "clients": 3, "mu": MU, "local_epochs": 2},
    }
    return load(tables, overrides)


def batches(settings: Config, part: Subset, client: int, number: int) -> Iterator[Any]:
    """The batches of a client's round."""
    seed = derive_seed(settings.train.seed, "client", client, number) % 2**31
    loader = datasets.Loader(part, settings.train.global_batch, seed=seed)
    for _ in range(settings.federated.local_epochs * loader.batches_per_epoch):
        yield next(loader)


def trained(
    settings: Config, model: nn.Module, correction: Tensor, given: Iterator[Any]
) -> tuple[Tensor, int]:
    """The weights after a client's steps, and how many used the branch."""
    train, start, used = settings.train, flat(model), 0
    params = [param for _, param in sorted(model.named_parameters())]
    optimizer = torch.optim.SGD(params, train.lr)
    for inputs, targets in given:
        optimizer.zero_grad()
        weights = torch.cat([param.reshape(-1) for param in params])
        loss = nn.functional.cross_entropy(model(inputs.double()), targets)
        used += bool(inputs[0, 20] > 0.5)
        if settings.federated.strategy == "fedprox":
            loss = loss + MU / 2 * (weights - start).square().sum()
        (loss + correction @ weights).backward()
        if train.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(params, train.clip_grad_norm)
        optimizer.step()
    return flat(model), used


def plain_loop(settings: Config) -> Tensor:
    seed = settings.train.seed
    model = assemble.make_model(assemble.model_keys(settings), seed).double()
    parts = [samples.train for samples in ServerData(settings).samples]
    weights = flat(model)
    control = torch.zeros_like(weights)
    own = [torch.zeros_like(weights) for _ in parts]
    for number in range(1, settings.federated.rounds + 1):
        moves, before = [], control
        for client, part in enumerate(parts):
            copy = deepcopy(model)
            fill([param for _, param in sorted(copy.named_parameters())], weights)
            given = list(batches(settings, part, client, number))
            added = before - own[client]
            after, used = trained(settings, copy, added, iter(given))
            assert 0 < used < len(given)
            moves.append((after - weights, len(part)))
            if settings.federated.strategy == "scaffold":
                rate = len(given) * settings.train.lr
                moved = -before - (after - weights) / rate
                own[client] = own[client] + moved
                control = control + moved / len(parts)
        is_mean = settings.federated.strategy == "scaffold"  # over clients, not over samples
        total = sum(1 if is_mean else count for _, count in moves)
        for change, count in moves:
            weights = weights + change * (1 if is_mean else count) / total
    return weights


@pytest.mark.parametrize("plan", ["dp1", "tp2"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("federated.strategy=fedprox",),
        ("federated.strategy=fedprox", "train.clip_grad_norm=0.05"),
        ("federated.strategy=scaffold",),
    ],
)
@pytest.mark.filterwarnings("ignore:tp2 divides no layer")
def test_corrections_are_of_all_parameters_and_within_the_norm(
    ranks: Run, plan: str, overrides: tuple[str, ...]
) -> None:
    settings = settings_of(*overrides, plan=plan)
    count = 2 if plan == "tp2" else 1
    weights, _ = ranks(count, rounds_on, settings, plan=plan)[0]
    expected = plain_loop(settings)
    assert (weights - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero3", "dp2:server", "pp2 mb2"])
def test_the_norm_has_the_correction_under_every_plan(ranks: Run, plan: str) -> None:
    over = ("federated.strategy=fedprox", "federated.mu=0.5", "train.clip_grad_norm=0.05")
    over = (*over, "model.num_hidden_layers=2")
    alone, _ = ranks(1, rounds_on, config(*over))[0]
    settings = config(*over, plan=f"{plan} precision:float64")
    for weights, _ in ranks(2, rounds_on, settings, plan=plan):
        assert (weights - alone).abs().max() <= 1e-12 * alone.abs().max()


@pytest.mark.parametrize("plan", ["pp2:pipedream mb2", "pp2:2bw mb2", "dp2:local,every3"])
def test_no_client_gets_what_another_has_left_under_way(ranks: Run, plan: str) -> None:
    over = ["model.num_hidden_layers=2", "federated.local_epochs=1"]
    if "local" in plan:
        over += ["train.outer_lr=0.7", "train.outer_momentum=0.9"]
    settings = config(*over, plan=f"{plan} precision:float64")
    alone, _ = ranks(2, changes, settings, [0], plan=plan)[0]
    last, _ = ranks(2, changes, settings, [1, 2, 0], plan=plan)[0]
    assert torch.equal(alone, last)
