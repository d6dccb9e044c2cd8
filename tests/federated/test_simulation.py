"""Federations on the digits: equal to a reference by hand, whatever a client's plan is; and nothing
but updates travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import datasets
from plait.comm import World
from plait.config import Config, load
from plait.engine.seeds import derive_seed
from plait.engine.state.init import Initializer, place_holders
from plait.errors import ConfigError, RunError
from plait.models import losses
from plait.outer.federated import messages
from plait.outer.federated.messages import Reply, TrainTask
from plait.outer.federated.rounds import Round, Server, choose, draw
from plait.outer.federated.samples import Subset
from plait.outer.federated.simulation import (
    LocalFleet,
    PoolFleet,
    make_server,
    shared_seed,
    simulate,
)
from plait.outer.federated.split import split
from plait.plan import Plan
from plait.run import assemble, optimizers

Run = Callable[..., list[Any]]


def config(*overrides: str, plan: str = "dp1 precision:float64") -> Config:
    tables: dict[str, Any] = {
        "model": {
            "name": "mlp",
            "in_features": 64,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "out_features": 10,
        },
        "data": {"name": "digits"},
        "train": {"global_batch": 64, "optimizer": "sgd", "lr": 0.2},
        "plan": {"text": plan},
        "federated": {"rounds": 2, "clients": 4, "partition": "dirichlet", "local_epochs": 2},
    }
    return load(tables, overrides)


def rounds_on(
    world: World, settings: Config, fails: Callable[[int, int], bool] | None = None
) -> tuple[Tensor, list[Round]]:
    fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world, fails)
    server = make_server(settings, fleet.initial())
    done = list(server.run(fleet))
    return server.weights, done


def reference(settings: Config, rates: Sequence[float] = ()) -> Tensor:
    """FedAvg in plain PyTorch: copies of one model, trained one after the other, and the mean of
    their changes. `rates`: the learning rate of each round, where they are not all that of
    `[train]`.
    """
    keys = assemble.model_keys(settings)
    model = assemble.make_model(keys)
    place_holders(model, torch.float64, torch.device("cpu"))
    Initializer(model, settings.train.seed, torch.float64, torch.device("cpu")).run(
        lambda param, value: setattr(param, "data", value.clone())
    )
    params = [param for _, param in sorted(model.named_parameters())]
    dataset = datasets.make(settings.data, keys, settings.train.seed)
    parts = split(dataset, settings.federated, settings.train.seed).train
    weights = torch.cat([param.detach().reshape(-1) for param in params])
    for number in range(1, settings.federated.rounds + 1):
        total = torch.zeros_like(weights)
        examples = 0
        for client, part in enumerate(parts):
            fill(params, weights)
            optimizer = optimizers.from_config(settings.train)(params)
            for group in optimizer.param_groups if rates else ():
                group["lr"] = rates[number - 1]
            seed = derive_seed(settings.train.seed, "client", client, number) % 2**31
            loader = datasets.Loader(Subset(dataset, part), settings.train.global_batch, seed=seed)
            for _ in range(settings.federated.local_epochs * loader.batches_per_epoch):
                inputs, targets = next(loader)
                model.zero_grad()
                loss_sum, count = losses.cross_entropy(model(inputs.double()), targets)
                (loss_sum / count).backward()
                optimizer.step()
            total.add_(
                torch.cat([param.detach().reshape(-1) for param in params]) - weights,
                alpha=len(part),
            )
            examples += len(part)
        weights = weights.add(total.div_(examples), alpha=1.0)
    return weights


def fill(params: list[nn.Parameter], weights: Tensor) -> None:
    offset = 0
    with torch.no_grad():
        for param in params:
            param.copy_(weights[offset : offset + param.numel()].view(param.shape))
            offset += param.numel()


def test_fedavg_is_the_reference_bit_for_bit(ranks: Run) -> None:
    weights, _ = ranks(1, rounds_on, config())[0]
    assert torch.equal(weights, reference(config()))


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero3", "dp2:server", "tp2", "pp2 mb2"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "scaffold"])
def test_a_client_may_be_parallel(ranks: Run, plan: str, strategy: str) -> None:
    over = (f"federated.strategy={strategy}", "model.num_hidden_layers=2")
    alone, _ = ranks(1, rounds_on, config(*over))[0]
    results = ranks(2, rounds_on, config(*over, plan=f"{plan} precision:float64"), plan=plan)
    for weights, _ in results:
        assert (weights - alone).abs().max() <= 1e-10 * alone.abs().max()


def test_secure_aggregation_changes_nothing_but_what_the_server_sees(ranks: Run) -> None:
    plain, _ = ranks(1, rounds_on, config())[0]
    secret, _ = ranks(1, rounds_on, config("federated.secure=true"))[0]
    assert (plain - secret).abs().max() < 1e-6


def three_die(number: int, client: int) -> bool:
    return number == 2 and client in (1, 4, 7)


def without_the_dead(world: World, settings: Config) -> Tensor:
    """Two rounds by hand: in the second the mean over those that lived."""
    fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world)
    weights = fleet.initial()
    for number in (1, 2):
        replies = fleet.train(
            TrainTask(number, weights), [c for c in range(10) if not three_die(number, c)]
        )
        total = sum(reply.num_examples for reply in replies)
        weights = weights + torch.stack(
            [reply.change * (reply.num_examples / total) for reply in replies]
        ).sum(dim=0)
    return weights


@pytest.mark.parametrize("secure", ["false", "true"])
def test_three_of_ten_clients_killed_lose_nothing_of_the_others(ranks: Run, secure: str) -> None:
    """Under secure aggregation they die after they have shared their secrets: the others' masks
    towards them have to go.
    """
    settings = config(
        "federated.clients=10",
        f"federated.secure={secure}",
        "federated.rounds=2",
        "federated.local_epochs=1",
    )
    weights, done = ranks(1, rounds_on, settings, three_die)[0]
    assert done[1].answered == (0, 2, 3, 5, 6, 8, 9) and len(done[1].asked) == 10
    expected = ranks(1, without_the_dead, settings)[0]
    assert (weights - expected).abs().max() <= (1e-6 if secure == "true" else 1e-12)


def too_many_die(number: int, client: int) -> bool:
    return client > 0


def void_round(world: World) -> str:
    with pytest.raises(RunError) as caught:
        rounds_on(world, config("federated.min_replies=2"), too_many_die)
    return str(caught.value)


def test_a_round_of_too_few_is_void(ranks: Run) -> None:
    assert ranks(1, void_round)[0] == "round 1: 1 of 4 clients answered, and 2 are needed"


class Tapped(LocalFleet):
    """A fleet whose every message is kept."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: list[Reply] = []

    def train(self, task: TrainTask, clients: Any) -> list[Reply]:
        replies = super().train(task, clients)
        self.sent += replies
        return replies


def tapped(world: World, strategy: str) -> Any:
    settings = config(f"federated.strategy={strategy}")
    fleet = Tapped(settings, Plan.parse("dp1 precision:float64"), world)
    server = make_server(settings, fleet.initial())
    list(server.run(fleet))
    pixels = datasets.make(settings.data, settings.model, 0).tensors[0].double()
    return fleet.sent, server.weights.numel(), pixels[:50]


@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
def test_data_never_leaves_a_client(ranks: Run, strategy: str) -> None:
    """Every message of every client: its fields, their shapes, and no run of values that is a
    sample.
    """
    sent, numel, pixels = ranks(1, tapped, strategy)[0]
    assert len(sent) == 8
    for reply in sent:
        assert set(vars(reply)) == {
            "client",
            "number",
            "num_examples",
            "change",
            "metrics",
            "extra",
        }
        assert isinstance(reply.num_examples, int) and set(reply.metrics) <= messages.METRICS
        assert set(reply.extra) == ({"control"} if strategy == "scaffold" else set())
        for vector in (reply.change, *reply.extra.values()):
            assert vector.shape == (numel,)
            windows = vector.unfold(0, 64, 1)
            distance = torch.cdist(
                windows / windows.norm(dim=1, keepdim=True).clamp(min=1e-12),
                pixels / pixels.norm(dim=1)[:, None],
            )
            assert distance.min() > 0.1


def test_the_pool_computes_what_one_process_computes() -> None:
    from plait.engine.build import join_world

    settings = config("federated.strategy=scaffold", "federated.rounds=2")
    plan = Plan.parse(settings.plan.text)
    world = join_world(plan)
    pool = PoolFleet(settings, plan, world, workers=2)
    server = make_server(settings, pool.initial())
    done = list(server.run(pool))
    for process in list(pool._pool._processes.values()):
        process.kill()
        process.join()
    task = TrainTask(3, server.weights, server.strategy.extra(server.weights))
    assert len(pool.train(task, [0])) in (
        0,
        1,
    )  # missing, or trained by new workers where the deaths were noticed before
    assert len(pool.train(task, [0])) == 1
    pool.close()
    alone, expected = rounds_on(world, settings)
    world.close()
    assert torch.equal(server.weights, alone)
    assert [d.accuracy for d in done] == [d.accuracy for d in expected]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["federated.secure=true", "federated.strategy=krum"],
            "secure aggregation gives the server the mean alone",
        ),
        (["federated.noise=1.0"], "noise without clipping"),
        (["federated.clip=1.0", "federated.strategy=median"], "privacy is counted for the mean"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    ranks: Run, overrides: list[str], message: str
) -> None:
    server = make_server(config(*overrides), torch.zeros(3))
    with pytest.raises(RunError, match=message):
        next(server.run(None))  # type: ignore[arg-type]


def test_the_clients_of_a_round_are_drawn_by_its_seed() -> None:
    drawn = [choose(10, 0.3, 7, number) for number in range(50)]
    assert all(len(set(clients)) == 3 for clients in drawn) and drawn == [
        choose(10, 0.3, 7, number) for number in range(50)
    ]
    assert len({client for clients in drawn for client in clients}) == 10


def test_with_noise_every_client_is_drawn_by_itself() -> None:
    """Poisson sampling, which is what epsilon assumes: sizes vary as they should, and pairs come
    together by chance only.
    """
    drawn = [draw(10, 0.3, seed) for seed in range(4000)]
    sizes = torch.tensor([float(len(clients)) for clients in drawn])
    assert abs(sizes.mean() - 3) < 0.15 and abs(sizes.var() - 2.1) < 0.25 and min(sizes) == 0
    both = sum({2, 7} <= set(clients) for clients in drawn) / len(drawn)
    assert abs(both - 0.09) < 0.025


def private_round(world: World, secure: str) -> Any:
    settings = config(
        "federated.clip=0.1",
        "federated.noise=1e-9",
        "federated.fraction=0.5",
        f"federated.secure={secure}",
    )
    fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world)
    server = make_server(settings, fleet.initial())
    server.seed = lambda: 9  # draws clients 0, 1 and 2 of 4
    before = server.weights
    done = server.round(fleet, 1)
    replies = fleet.train(TrainTask(1, before, {}), done.asked)
    clipped = sum(reply.change * min(1.0, 0.1 / float(reply.change.norm())) for reply in replies)
    return done, server.weights - before, clipped


@pytest.mark.parametrize("secure", ["false", "true"])
def test_a_private_mean_is_over_the_expected_number_of_clients(ranks: Run, secure: str) -> None:
    done, change, clipped = ranks(1, private_round, secure)[0]
    assert done.asked == (0, 1, 2)  # three, and two are expected
    assert torch.allclose(change, clipped / 2, rtol=0, atol=1e-7)


def nobody_drawn(world: World) -> Any:
    settings = config("federated.clip=0.1", "federated.noise=1.0", "federated.fraction=0.01")
    fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world)
    server = make_server(settings, fleet.initial())
    before = server.weights
    return server.round(fleet, 1), bool((server.weights - before).abs().max() > 0)


def test_a_round_of_nobody_is_noise_alone(ranks: Run) -> None:
    done, moved = ranks(1, nobody_drawn)[0]
    assert done.asked in ((), (0,), (1,), (2,), (3,)) and moved


def noisy(world: World) -> Tensor:
    seen: list[Tensor] = []
    settings = config(
        "federated.clip=0.5",
        "federated.noise=1.0",
        "federated.fraction=0.7",
        plan="dp2 precision:float64",
    )
    fleet = LocalFleet(settings, Plan.parse(settings.plan.text), world)
    server = make_server(settings, fleet.initial())
    server.seed = lambda: shared_seed(world)
    for _ in server.run(fleet):
        seen.append(server.weights)
    return seen[-1]


def test_ranks_of_one_federation_add_the_same_noise(ranks: Run) -> None:
    one, other = ranks(2, noisy, plan="dp2")
    assert torch.equal(one, other)


def test_the_config_names_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="did you mean 'clients'"):
        config("federated.client=3")
    with pytest.raises(ConfigError, match=r"federated\.fraction"):
        config("federated.fraction=1.5")


def test_a_run_prints_its_rounds_and_privacy(tmp_path: Path) -> None:
    seen: list[Round] = []
    result = simulate(
        config("federated.clip=0.5", "federated.noise=1.0", "federated.rounds=2", plan="dp1"),
        seen.append,
    )
    assert [done.number for done in seen] == [1, 2]
    assert result["epsilon"] == seen[-1].epsilon and result["epsilon"] > seen[0].epsilon  # type: ignore[operator]
    assert result["received_bytes"] == 2 * 4 * seen[0].received_bytes // 4
    assert isinstance(Server, type)
