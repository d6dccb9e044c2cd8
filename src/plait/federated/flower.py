"""The same server and the same clients behind Flower: `server_app` and `client_app` for its SuperLink and SuperNodes.

Flower moves the messages (TLS, node authentication, retries); what is in them is `messages.Task` and `messages.Reply`, and
what is made of them is `rounds.Server`. A node says which client it is by `partition-id` in its node config. Arrays travel
in NumPy's format without pickle.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from plait.errors import RunError

if TYPE_CHECKING:  # a node answers who it is in a process of its own, which need not load torch for that
    from torch import Tensor

    from plait.federated.messages import Reply, Task
    from plait.federated.simulation import LocalFleet

WEIGHTS, TASK, REPLY, METRICS = "weights", "task", "reply", "metrics"


def arrays(vectors: Mapping[str, Tensor]) -> ArrayRecord:
    """Vectors as Flower carries them."""
    return ArrayRecord({name: Array(vector.numpy()) for name, vector in vectors.items()})


def vectors_of(record: ArrayRecord) -> dict[str, Tensor]:
    """The vectors of a record."""
    import torch

    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


# -- the client -------------------------------------------------------------------------------------------------------


def client_app(config: str | Path) -> ClientApp:
    """A node: trains its own samples when asked, judges weights when asked, and says who it is."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _reply(message, {METRICS: MetricRecord({"client": _own(context)})})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from plait.federated.messages import Task

        fleet, client = _fleet(config), _own(context)
        vectors = vectors_of(message.content.array_records[WEIGHTS])
        number = int(message.content.config_records[TASK]["number"])  # type: ignore[arg-type]
        samples = fleet.samples[client]
        kept = context.state.array_records.get("control")
        samples.control = None if kept is None else vectors_of(kept)["control"]
        reply = fleet.client.run(Task(number, vectors.pop("weights"), vectors), samples)
        if samples.control is not None:
            context.state.array_records["control"] = arrays({"control": samples.control})
        metrics = {**reply.metrics, "client": client, "num_examples": reply.num_examples}
        return _reply(message, {REPLY: arrays({"change": reply.change, **reply.extra}), METRICS: MetricRecord(metrics)})

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        fleet, client = _fleet(config), _own(context)
        weights = vectors_of(message.content.array_records[WEIGHTS])["weights"]
        accuracy = fleet.judge.accuracy(weights, fleet.samples[client].test)
        return _reply(message, {METRICS: MetricRecord({"client": client, "accuracy": accuracy})})

    return app


def _fleet(config: str | Path) -> LocalFleet:
    from plait.config import load
    from plait.engine.build import join_world
    from plait.federated.simulation import LocalFleet
    from plait.plan import Plan

    settings = load(config)
    plan = Plan.parse(settings.plan.text)
    return LocalFleet(settings, plan, join_world(plan))


def _own(context: Context) -> int:
    """Which client this node is."""
    return int(context.node_config["partition-id"])


def _reply(message: Message, content: dict[str, Any]) -> Message:
    return Message(RecordDict(content), reply_to=message)


# -- the server -------------------------------------------------------------------------------------------------------


class NodeFleet:
    """Flower's nodes as clients. Nodes that do not answer within `patience_seconds` are missing from the round."""

    def __init__(self, grid: Grid, own: LocalFleet, patience_seconds: float) -> None:
        self._grid, self._own, self._patience_seconds = grid, own, patience_seconds
        self.num_clients = own.num_clients
        self._clients: dict[int, int] = {}  # client by node, of all nodes that have ever answered

    def nodes(self) -> dict[int, int]:
        """The node of each client that is there now. A node is asked once who it is."""
        there = set(self._grid.get_node_ids())
        asked = [Message(RecordDict(), node, "query") for node in sorted(there - self._clients.keys())]
        for answer in self._grid.send_and_receive(asked, timeout=self._patience_seconds) if asked else []:
            if not answer.has_error():
                client = answer.content.metric_records[METRICS]["client"]
                self._clients[answer.metadata.src_node_id] = int(client)  # type: ignore[arg-type]
        return {client: node for node, client in self._clients.items() if node in there}

    def wait(self, count: int, patience_seconds: float) -> None:
        """Return when `count` clients are there. Raises `RunError` after the time."""
        deadline = time.monotonic() + patience_seconds
        while len(there := self.nodes()) < count:
            if time.monotonic() > deadline:
                raise RunError(f"{len(there)} of {count} clients are there after {patience_seconds:g} s")
            time.sleep(1.0)

    def train(self, task: Task, clients: Sequence[int]) -> list[Reply]:
        from plait.federated.messages import Reply

        content = {
            WEIGHTS: arrays({"weights": task.weights, **task.extra}),
            TASK: ConfigRecord({"number": task.number}),
        }
        replies = []
        for answer in self._ask("train", content, clients):
            metrics = {name: float(value) for name, value in answer.content.metric_records[METRICS].items()}  # type: ignore[arg-type]
            client, num_examples = int(metrics.pop("client")), int(metrics.pop("num_examples"))
            vectors = vectors_of(answer.content.array_records[REPLY])
            replies.append(Reply(client, task.number, num_examples, vectors.pop("change"), metrics, vectors))
        return replies

    def accuracies(self, weights: Tensor) -> dict[int, float]:
        answers = self._ask("evaluate", {WEIGHTS: arrays({"weights": weights})}, range(self.num_clients))
        told = [answer.content.metric_records[METRICS] for answer in answers]
        return {int(metrics["client"]): float(metrics["accuracy"]) for metrics in told}  # type: ignore[arg-type]

    def accuracy(self, weights: Tensor) -> float:
        return self._own.accuracy(weights)

    def _ask(self, kind: str, content: dict[str, Any], clients: Sequence[int]) -> list[Message]:
        nodes = self.nodes()
        asked = [Message(RecordDict(dict(content)), nodes[client], kind) for client in clients if client in nodes]
        answers = self._grid.send_and_receive(asked, timeout=self._patience_seconds) if asked else []
        return [answer for answer in answers if not answer.has_error()]


def server_app(config: str | Path, out: str | Path | None = None, patience_seconds: float = 120.0) -> ServerApp:
    """The server: waits for `min_replies` clients, runs the rounds of the config, prints and writes their numbers."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        import json

        from plait.config import load
        from plait.federated.simulation import make_server, totals

        settings = load(config)
        own = _fleet(config)
        fleet = NodeFleet(grid, own, patience_seconds)
        fleet.wait(settings.federated.min_replies, patience_seconds)
        server = make_server(settings, own.initial())
        rounds = []
        for done in server.run(fleet):
            rounds.append(done.as_dict())
            print(f"plait round {done.number} accuracy {done.accuracy:.4f} answered {list(done.answered)}", flush=True)
            if out is not None:
                Path(out).write_text(json.dumps({"rounds": rounds, **totals(rounds)}, indent=2) + "\n")

    return app
