"""Clients in this process, or in a pool of processes: a federation on one machine, without any
other software.

A worker has one engine and serves its clients in turn. So memory grows with the workers and not
with the clients.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from plait import datasets
from plait.checkpoint.folder import write_text_atomic
from plait.comm import World
from plait.config import Config
from plait.engine.build import build, join_world
from plait.engine.precision import MASTER_DTYPES
from plait.errors import NonFiniteLoss, RunError
from plait.launcher.agent import start_server
from plait.launcher.main_process import say
from plait.launcher.rank import die_with_parent
from plait.outer.federated.client import Client, LocalOptions, get_weights
from plait.outer.federated.evaluator import Evaluator
from plait.outer.federated.local_rules import RoundRate, check_local_training
from plait.outer.federated.messages import Reply, TrainTask, tell_missing
from plait.outer.federated.progress import Progress, workload
from plait.outer.federated.rounds import RoundOptions, Server, choose
from plait.outer.federated.samples import ClientState, Samples, Subset
from plait.outer.federated.secret_round import Content, SecureClients, answer
from plait.outer.federated.server_state import read_state, state_path, write_state
from plait.outer.federated.split import split
from plait.outer.federated.strategies import StrategySettings, make
from plait.outer.federated.weights_file import write_weights
from plait.plan import Plan
from plait.run import assemble, optimizers
from plait.values import JsonObject

T = TypeVar("T")


class ServerData:
    """The samples of a config, dealt out, and the evaluator of weights on them. A server has
    nothing else, and needs no engine.
    """

    def __init__(self, config: Config) -> None:
        keys = assemble.model_keys(config)
        seed = config.train.seed
        dataset = datasets.make(config.data, keys, seed)
        parts = split(dataset, config.federated, seed)
        self.samples = [
            Samples(client, Subset(dataset, train), Subset(dataset, own))
            for client, (train, own) in enumerate(zip(parts.train, parts.own_test, strict=True))
        ]
        self._test = Subset(dataset, parts.test)
        self.evaluator = Evaluator(
            assemble.make_model(keys, seed),
            seed,
            MASTER_DTYPES[Plan.parse(config.plan.text).precision],
        )

    def accuracy(self, weights: Tensor) -> float | None:
        """The accuracy of the flat weights on the samples that the server holds out."""
        return self.evaluator.accuracy(weights, self._test)


class LocalFleet:
    """All clients in this process, one after the other. `fails(round, client)` simulates those that
    do not answer.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        world: World,
        fails: Callable[[int, int], bool] | None = None,
    ) -> None:
        server_data = ServerData(config)
        self.samples = server_data.samples
        self.evaluator = server_data.evaluator
        self.accuracy = server_data.accuracy
        self.num_clients = config.federated.clients
        self._secure_clients = SecureClients(config.federated.clip)
        self._fails = fails or (lambda number, client: False)
        rate = RoundRate(config)
        engine = build(
            assemble.make_model(assemble.model_keys(config), config.train.seed),
            plan,
            loss=assemble.make_loss(config.train, assemble.model_keys(config)),
            optimizer=optimizers.from_config(config.train),
            options=replace(assemble.make_options(config, plan), learning_rate=rate),
            world=world,
        )
        self.client = Client(engine, local_of(config), rate)

    def initial(self) -> Tensor:
        """The flat weights (numel,) that training begins with."""
        return get_weights(self.client.engine)

    def train(self, task: TrainTask, clients: Sequence[int]) -> list[Reply]:
        replies = []
        progress = Progress(task.number, self.num_steps(clients))
        for client in clients:
            if not self._fails(task.number, client):
                try:
                    replies.append(self.client.run(task, self.samples[client], progress.advance))
                except NonFiniteLoss as error:  # it has nothing to send
                    tell_missing(client, error)
        return replies

    def num_steps(self, clients: Sequence[int]) -> int:
        """The steps of a round of these clients, together."""
        local = self.client.local
        return sum(local.num_steps(len(self.samples[client].train)) for client in clients)

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """The flat weights (numel,) as parameters [...], by name."""
        return self.evaluator.named(weights)

    def num_samples(self) -> int:
        """The samples of all clients that they train on."""
        return sum(len(samples.train) for samples in self.samples)

    def secret(self, phase: str, contents: Mapping[int, Content]) -> dict[int, Content]:
        return answer(self._secure_clients, phase, contents, self.train)

    def accuracies(self, weights: Tensor) -> dict[int, float | None]:
        """The accuracy of the flat weights on test samples of each client."""
        return {
            samples.client: self.evaluator.accuracy(weights, samples.test)
            for samples in self.samples
        }


def local_of(config: Config) -> LocalOptions:
    """How clients train, from `[federated]` and `[train]`."""
    check_local_training(config)
    section = config.federated
    train = config.train
    return LocalOptions(
        epochs=section.local_epochs,
        batch=train.global_batch,
        mu=section.mu if section.strategy == "fedprox" else 0.0,
        scaffold_lr=train.lr if section.strategy == "scaffold" else None,
        seed=train.seed,
    )


def make_server(config: Config, weights: Tensor) -> Server:
    """The server's side of a config, which begins with the flat weights (numel,)."""
    section = config.federated
    settings = StrategySettings(
        lr=section.server_lr,
        momentum=section.server_momentum,
        betas=section.server_betas,
        tau=section.tau,
        mu=section.mu,
        trim=section.trim,
        num_bad=section.num_bad,
        num_clients=section.clients,
    )
    rules = RoundOptions(
        rounds=section.rounds,
        fraction=section.fraction,
        min_replies=section.min_replies,
        secure=section.secure,
        clip=section.clip,
        noise=section.noise,
        delta=section.delta,
        seed=config.train.seed,
        evaluate_every=section.evaluate_every,
    )
    return Server(weights, make(section.strategy, settings), rules)


# -- a pool of processes
# ----------------------------------------------------------------------------------------------

_FLEET: LocalFleet | None = None  # of this worker process


def _begin(config: Config, plan: str) -> None:
    # A worker process is one client after the other, and has one engine.
    global _FLEET  # noqa: PLW0603
    die_with_parent()
    torch.set_num_threads(1)
    _FLEET = LocalFleet(config, Plan.parse(plan), join_world(Plan.parse(plan)))


def _train(task: TrainTask, client: int, kept: ClientState) -> tuple[Reply, ClientState]:
    assert _FLEET is not None
    samples: Samples = _FLEET.samples[client]
    samples.kept = kept
    return _FLEET.client.run(task, samples), samples.kept


def _evaluate(weights: Tensor, client: int) -> float | None:
    assert _FLEET is not None
    return _FLEET.evaluator.accuracy(weights, _FLEET.samples[client].test)


class PoolFleet:
    """Clients in `workers` processes, each with one engine of one rank. Who had not answered when a
    worker died is missing.
    """

    def __init__(self, config: Config, plan: Plan, world: World, workers: int) -> None:
        self._own = LocalFleet(
            config, plan, world
        )  # evaluates the global model, and says where training begins
        self.num_clients = self._own.num_clients
        self.num_steps = self._own.num_steps
        self.num_samples = self._own.num_samples
        self.named = self._own.named
        self.samples = self._own.samples
        self._secure_clients = SecureClients(config.federated.clip)
        context = multiprocessing.get_context(start_server())
        self._start = lambda: ProcessPoolExecutor(
            workers, mp_context=context, initializer=_begin, initargs=(config, str(plan))
        )
        self._pool = self._start()

    def initial(self) -> Tensor:
        """The flat weights (numel,) that training begins with."""
        return self._own.initial()

    def train(self, task: TrainTask, clients: Sequence[int]) -> list[Reply]:
        futures = {
            client: self._submit(_train, task, client, self.samples[client].kept)
            for client in clients
        }
        replies = []
        progress = Progress(task.number, self.num_steps(clients))
        broken = False
        for client, future in futures.items():
            try:
                samples: Samples = self.samples[client]
                reply, samples.kept = future.result()
                replies.append(reply)
                progress.advance(self.num_steps([client]))
            except NonFiniteLoss as error:  # it has nothing to send
                tell_missing(client, error)
            except BrokenProcessPool:  # a worker died, and with it those that had not answered
                tell_missing(client, RunError("a process of federated.workers died"))
                broken = True
        if broken:
            self._restart()
        return replies

    def _submit(self, work: Callable[..., T], *words: object) -> Future[T]:
        try:
            return self._pool.submit(work, *words)
        except BrokenProcessPool:  # since the last round
            self._restart()
            return self._pool.submit(work, *words)

    def _restart(self) -> None:
        self._pool.shutdown()
        self._pool = self._start()

    def secret(self, phase: str, contents: Mapping[int, Content]) -> dict[int, Content]:
        """The clients' secrets are kept here, since any worker may train any client."""
        return answer(self._secure_clients, phase, contents, self.train)

    def accuracies(self, weights: Tensor) -> dict[int, float | None]:
        """The accuracy of the flat weights on test samples of each client."""
        futures = {
            client: self._submit(_evaluate, weights, client) for client in range(self.num_clients)
        }
        return {client: future.result() for client, future in futures.items()}

    def accuracy(self, weights: Tensor) -> float | None:
        """The accuracy of the flat weights on the samples that the server holds out."""
        return self._own.accuracy(weights)

    def close(self) -> None:
        """End the workers."""
        self._pool.shutdown(cancel_futures=True)


def simulate(
    config: Config,
    on_round: Callable[[Any], None],
    fails: Callable[[int, int], bool] | None = None,
    out: Path | None = None,
    weights: Path | None = None,
    *,
    resume: bool = False,
) -> JsonObject:
    """Run a config's federation on this machine, and return its numbers. Every rank of a client's
    plan calls it.

    After each round the file `out` holds the numbers so far, and `weights` the newest weights.
    Beside `weights` is a file of the state, from which `resume` goes on.

    Raises:
        CheckpointError: to `resume`, a state that is missing, damaged or of another config.
        RunError: several workers and a plan of several ranks, or data that each client has on its
            own machine.
    """
    plan = Plan.parse(config.plan.text)
    world = join_world(plan, backend=config.cluster.backend)
    workers = config.federated.workers
    if workers > 1 and plan.world_size > 1:
        raise RunError(
            f"federated.workers = {workers} needs clients of one rank, and the plan '{plan}' has "
            f"{plan.world_size}"
        )
    if config.federated.partition == "own":
        raise RunError(
            "federated.partition = 'own' is for --deploy, where each client's [data] is on its own "
            "machine"
        )
    fleet = (
        PoolFleet(config, plan, world, workers)
        if workers > 1
        else LocalFleet(config, plan, world, fails)
    )
    try:
        server = make_server(config, fleet.initial())
        server.seed = lambda: shared_seed(world)
        asked = choose(fleet.num_clients, config.federated.fraction, config.train.seed, 1)
        say(workload(config, len(asked), fleet.num_steps(asked), fleet.num_samples()))
        rounds: list[JsonObject] = []

        def keep() -> None:
            """Write what is known after the last round; the state first, as it holds the rest."""
            if weights is not None:
                write_state(state_path(weights), config, server, fleet.samples, rounds)
                write_weights(weights, fleet.named(server.weights), len(rounds))
            if out is not None:
                write_text_atomic(out, json.dumps(numbers(rounds, plan), indent=2) + "\n")

        if resume:
            assert weights is not None
            again = "leave --resume out"
            rounds += read_state(state_path(weights), config, server, fleet.samples, again)[0]
            say(f"plait: resumed after round {len(rounds)}")
            if world.rank == 0:
                keep()
        for done in server.run(fleet, len(rounds)):
            rounds.append(done.as_dict())
            if world.rank == 0:
                keep()
                on_round(done)
    finally:
        if isinstance(fleet, PoolFleet):
            fleet.close()
    world.close()
    return numbers(rounds, plan)


def numbers(rounds: Sequence[JsonObject], plan: Plan) -> JsonObject:
    """The numbers of a simulation: its rounds, the plan of a client, and the totals."""
    return {"rounds": [*rounds], "plan": str(plan), **totals(rounds)}


def shared_seed(world: World) -> int:
    """A secret seed that all ranks of the server's process group have alike."""
    axis = world.axis("world")
    own = secrets.randbits(63)
    return int(axis.gather_objects(own)[0]) if axis.size > 1 else own


def totals(rounds: Sequence[JsonObject]) -> JsonObject:
    """The numbers over all rounds."""
    last = rounds[-1] if rounds else {}
    evaluated = [round_record for round_record in rounds if round_record["client_accuracy"]]
    return {
        "accuracy": last.get("accuracy"),
        "client_accuracy_worst": evaluated[-1]["client_accuracy_worst"] if evaluated else None,
        "epsilon": last.get("epsilon"),
        "sent_bytes": sum(round_record["sent_bytes"] for round_record in rounds),
        "received_bytes": sum(round_record["received_bytes"] for round_record in rounds),
    }
