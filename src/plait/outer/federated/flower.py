"""Server and clients behind Flower: `server_app` for its SuperLink, `client_app` for SuperNodes.

Flower moves the messages (TLS, node authentication, retries). Their content is statements of
`wire`: one string of JSON, and vectors without pickle. What is made of them is `rounds.Server`. A
node's app only carries a message to the client daemon on its machine (`client_daemon`). So it loads
neither torch nor data.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from plait.errors import RunError
from plait.outer.federated import wire
from plait.values import JsonMapping

if TYPE_CHECKING:  # a node's app need not load torch
    from torch import Tensor

    from plait.outer.federated.messages import Reply, TrainTask
    from plait.outer.federated.secret_round import Content

HEAD = "head"
VECTORS = "vectors"
EVALUATE = "evaluate"
POLL_SECONDS = 0.1
BEGIN_SECONDS = 120.0  # for the daemon to have read its data
ANSWER_SECONDS = 24 * 3600.0
LAST_SECONDS = 3600.0  # for `min_replies` clients to be there and answer


def pack(head: JsonMapping, vectors: Mapping[str, np.ndarray[Any, Any]]) -> RecordDict:
    """A statement as Flower carries it."""
    record = RecordDict({HEAD: ConfigRecord({"json": json.dumps(dict(head), allow_nan=False)})})
    if vectors:
        record[VECTORS] = ArrayRecord({name: Array(vector) for name, vector in vectors.items()})
    return record


def unpack(record: RecordDict) -> tuple[wire.Head, wire.Vectors]:
    """The statement in a message."""
    vectors: JsonMapping = record.array_records.get(VECTORS, {})
    return json.loads(str(record.config_records[HEAD]["json"])), {
        name: array.numpy() for name, array in vectors.items()
    }


def _tensors(vectors: wire.Vectors) -> dict[str, Tensor]:
    """The vectors of a statement as torch has them, in memory of their own."""
    import torch

    return {name: torch.from_numpy(vector.copy()) for name, vector in vectors.items()}


# -- the client
# --------------------------------------------------------------------------------------------------


def client_app() -> ClientApp:
    """A node: hands every question to its client daemon and every answer back, and says who it
    is.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(
            pack({"client": int(context.node_config["partition-id"])}, {}), reply_to=message
        )

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _carry(message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _carry(message, context)

    return app


def _carry(message: Message, context: Context) -> Message:
    with _line(Path(str(context.node_config["resident"]))) as line:
        wire.send(line, *unpack(message.content))
        head, vectors = wire.receive(line)
    if "error" in head:
        raise RunError(head["error"])
    return Message(pack(head, vectors), reply_to=message)


def _line(path: Path) -> socket.socket:
    """A connection to the daemon, which may still be reading its data."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + BEGIN_SECONDS
    line.settimeout(ANSWER_SECONDS)
    while True:
        try:
            line.connect(str(path))
            return line
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


# -- the server
# --------------------------------------------------------------------------------------------------


class NodeFleet:
    """Flower's nodes as clients.

    A round waits for all that were asked; once `needed` have answered, for `patience_seconds` more.
    Who has not answered by then is missing from the round, and its late answer is not looked at.
    """

    def __init__(
        self,
        grid: Grid,
        num_clients: int,
        needed: int,
        patience_seconds: float,
        *,
        accuracy: Callable[[Tensor], float | None],
        federation: str,
    ) -> None:
        """Ask the nodes of a grid; `accuracy` is that of weights on the server's own samples.

        Clients drop the state that they have from another `federation`.
        """
        self._grid = grid
        self._needed = needed
        self._patience_seconds = patience_seconds
        self.num_clients = num_clients
        self._clients: dict[int, int] = {}  # client by node, of all nodes that have ever answered
        self._accuracy = accuracy
        self._federation = federation

    def nodes(self) -> dict[int, int]:
        """The node of each client that is there now. A node is asked once who it is."""
        there = set(self._grid.get_node_ids())
        asked = {
            node: Message(pack({}, {}), node, "query")
            for node in sorted(there - self._clients.keys())
        }
        for node, (head, _) in self._exchange(asked, len(asked)).items():
            self._clients[node] = int(head["client"])
        return {client: node for node, client in self._clients.items() if node in there}

    def wait(self, count: int) -> dict[int, int]:
        """The nodes, when `count` clients are there. Raises `RunError` after an hour."""
        deadline = time.monotonic() + LAST_SECONDS
        while len(there := self.nodes()) < count:
            if time.monotonic() > deadline:
                raise RunError(
                    f"{len(there)} of {count} clients are there after {LAST_SECONDS:g} s"
                )
            time.sleep(POLL_SECONDS)
        return there

    def train(self, task: TrainTask, clients: Sequence[int]) -> list[Reply]:
        from plait.outer.federated.messages import Reply

        vectors = {"weights": task.weights, **task.extra}
        head = {"number": task.number, "federation": self._federation}
        answers = self._ask("train", dict.fromkeys(clients, (head, vectors)))
        return [
            Reply(
                client,
                task.number,
                int(head["num_examples"]),
                sent.pop("change"),
                head["metrics"],
                sent,
            )
            for client, (head, sent) in answers.items()
        ]

    def secret(self, phase: str, contents: Mapping[int, Content]) -> dict[int, Content]:
        return self._ask(phase, contents)

    def accuracies(self, weights: Tensor) -> dict[int, float | None]:
        """The accuracy of the flat weights on test samples of each client."""
        told = self._ask(
            EVALUATE, {client: ({}, {"weights": weights}) for client in range(self.num_clients)}
        )
        return {client: head["accuracy"] for client, (head, _) in told.items()}

    def accuracy(self, weights: Tensor) -> float | None:
        """The accuracy of the flat weights on the samples that the server holds out."""
        return self._accuracy(weights)

    def _ask(self, kind: str, questions: Mapping[int, Content]) -> dict[int, Content]:
        """The answers, by client."""
        nodes = self.wait(min(self._needed, len(questions)))
        flower_kind = EVALUATE if kind == EVALUATE else "train"
        messages = {}
        for client, (head, vectors) in questions.items():
            if client in nodes:
                arrays = {name: vector.numpy() for name, vector in vectors.items()}
                statement = pack({**head, "kind": kind}, arrays)
                messages[nodes[client]] = Message(statement, nodes[client], flower_kind)
        answers = self._exchange(messages, min(self._needed, len(questions)))
        return {
            self._clients[node]: (answers[node][0], _tensors(answers[node][1]))
            for node in sorted(answers, key=self._clients.__getitem__)
        }

    def _exchange(
        self, asked: Mapping[int, Message], needed: int
    ) -> dict[int, tuple[wire.Head, wire.Vectors]]:
        """The answers of nodes. Flower's own `send_and_receive` looks every three seconds, and
        knows one limit of time only.
        """
        answers: dict[int, tuple[wire.Head, wire.Vectors]] = {}
        waiting = set(self._grid.push_messages(list(asked.values()))) if asked else set()
        begin = time.monotonic()
        limit = begin + LAST_SECONDS
        while waiting and time.monotonic() < limit:
            for answer in self._grid.pull_messages(waiting):
                waiting.discard(answer.metadata.reply_to_message_id)
                node = answer.metadata.src_node_id
                if answer.has_error():
                    self._tell(node, answer)
                    continue
                answers[node] = unpack(answer.content)
                if len(answers) == needed:
                    limit = min(limit, time.monotonic() + self._patience_seconds)
            time.sleep(POLL_SECONDS if waiting else 0)
        return answers

    def _tell(self, node: int, answer: Message) -> None:
        """Say on stderr why a client is missing from a round."""
        client = self._clients.get(node)
        name = f"node {node}" if client is None else f"client {client}"
        reason = answer.error.reason or f"Flower's error {answer.error.code}"
        print(f"plait: {name} has no answer: {reason}", file=sys.stderr, flush=True)


def server_app(config: str | Path, out: str | Path) -> ServerApp:
    """The server: waits for `min_replies` clients and runs the rounds of the config.

    It prints what each gave and writes it to `out`. Beside that are the weights, as
    `weights.safetensors`, and the state from which an interrupted server goes on. With `restart` in
    the configuration of Flower's run it begins again.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from plait.config import load
        from plait.outer.federated.served_rounds import ServedRounds
        from plait.outer.federated.simulation import ServerData, make_server

        settings = load(config)
        section = settings.federated
        server_data = ServerData(settings)
        server = make_server(settings, server_data.evaluator.initial())
        served = ServedRounds(settings, server, Path(out))
        if context.run_config.get("restart", False):
            served.begin_again()
        else:
            served.go_on()
        if served.rounds:  # a server that died between two files has written the state alone
            served.write(server_data.evaluator.named(server.weights))
        fleet = NodeFleet(
            grid,
            section.clients,
            section.min_replies,
            section.patience_seconds,
            accuracy=server_data.accuracy,
            federation=served.federation,
        )
        if len(served.rounds) < section.rounds:
            fleet.wait(section.min_replies)
        for round_done in server.run(fleet, len(served.rounds)):
            served.add(round_done)
            served.write(server_data.evaluator.named(server.weights))
            accuracy = round_done.accuracy
            judged = "" if accuracy is None else f" accuracy {accuracy:.4f}"
            print(
                f"plait round {round_done.number}{judged} answered {list(round_done.answered)}",
                flush=True,
            )

    return app
