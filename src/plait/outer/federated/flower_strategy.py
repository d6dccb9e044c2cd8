"""A rule of `strategies` as a strategy of Flower's own, for server apps that run Flower's loop
(`strategy.start(grid, ...)`).

The messages are those of `flower`, so any client app that `flower.client_app` makes understands
them. What Flower's loop has no place for (secure rounds, privacy, the late) is in `rounds.Server`,
which the apps of `plait federated --deploy` run.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower_strategies
from torch import Tensor

from plait.errors import RunError
from plait.outer.federated.flower import EVALUATE, pack, unpack
from plait.outer.federated.messages import Reply, check_reply
from plait.outer.federated.strategies import Strategy

WEIGHTS = "weights"


def to_arrays(weights: Tensor) -> ArrayRecord:
    """A record of Flower that holds the flat weights (numel,)."""
    return ArrayRecord({WEIGHTS: Array(weights.numpy())})


def from_arrays(arrays: ArrayRecord) -> Tensor:
    """The flat weights (numel,) of a record of Flower, the inverse of `to_arrays`."""
    return torch.from_numpy(arrays[WEIGHTS].numpy().copy())


class FlowerStrategy(flower_strategies.Strategy):
    """Asks every node that is there, each round, and lets `rule` make the new weights of what comes
    back.
    """

    def __init__(self, rule: Strategy) -> None:
        self._rule = rule
        self._weights = torch.empty(0)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._weights = from_arrays(arrays)
        vectors = {WEIGHTS: self._weights, **self._rule.extra(self._weights)}
        return self._to_all(grid, "train", {"number": server_round}, vectors)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        received = [
            reply
            for message in replies
            if (reply := self._reply(message, server_round)) is not None
        ]
        if not received:
            return None, None
        self._weights = self._rule.apply(self._weights, self._rule.combine(received))
        self._rule.note(received)
        losses = [
            reply.metrics["train_loss"] for reply in received if "train_loss" in reply.metrics
        ]
        metrics = MetricRecord(
            {
                "clients": len(received),
                **({"train_loss": statistics.fmean(losses)} if losses else {}),
            }
        )
        return to_arrays(self._weights), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._to_all(grid, EVALUATE, {}, {WEIGHTS: from_arrays(arrays)})

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        told = [
            unpack(message.content)[0]["accuracy"] for message in replies if not message.has_error()
        ]
        accuracies = [float(accuracy) for accuracy in told if accuracy is not None]
        return (
            MetricRecord({"accuracy": statistics.fmean(accuracies), "worst": min(accuracies)})
            if accuracies
            else None
        )

    def summary(self) -> None:
        logging.getLogger(__name__).info("plait: %s", type(self._rule).__name__)

    def _to_all(
        self, grid: Grid, kind: str, head: dict[str, object], vectors: dict[str, Tensor]
    ) -> list[Message]:
        flower_kind = EVALUATE if kind == EVALUATE else "train"
        sent = {name: vector.numpy() for name, vector in vectors.items()}
        return [
            Message(pack({**head, "kind": kind}, sent), node, flower_kind)
            for node in sorted(grid.get_node_ids())
        ]

    def _reply(self, message: Message, number: int) -> Reply | None:
        """The reply of a client; None for an error, and for a reply that may not travel."""
        if message.has_error():
            return None
        head, vectors = unpack(message.content)
        sent = {name: torch.from_numpy(vector.copy()) for name, vector in vectors.items()}
        reply = Reply(
            int(head["client"]),
            number,
            int(head["num_examples"]),
            sent.pop("change"),
            head["metrics"],
            sent,
        )
        try:
            return check_reply(reply, self._weights.numel())
        except RunError as error:
            logging.getLogger(__name__).warning("plait: %s", error)
            return None
