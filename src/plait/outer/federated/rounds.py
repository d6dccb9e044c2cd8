"""The server's loop: choose clients, send, wait for those that answer, combine, evaluate. It never
sees a sample.

What runs the clients is behind `Fleet`: this process, a pool of processes, or Flower's nodes.
"""

from __future__ import annotations

import random
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from plait.errors import RunError
from plait.launcher.main_process import say
from plait.outer.federated import privacy
from plait.outer.federated.messages import Reply, TrainTask, check_reply
from plait.outer.federated.secret_round import Content, secret_sum
from plait.outer.federated.strategies import Strategy


class Fleet(Protocol):
    """The clients of a federation, as the server asks them."""

    num_clients: int

    def train(self, task: TrainTask, clients: Sequence[int]) -> list[Reply]:
        """The replies of those clients that answer in time, in any order; others are simply
        missing.
        """

    def secret(self, phase: str, contents: Mapping[int, Content]) -> dict[int, Content]:
        """The answers of those clients that are there to one step of secure aggregation."""

    def accuracies(self, weights: Tensor) -> dict[int, float | None]:
        """The accuracy of the flat weights (numel,) on test samples of each client."""

    def accuracy(self, weights: Tensor) -> float | None:
        """The accuracy of the flat weights (numel,) on the samples that the server holds out. None
        where targets are no numbers of classes, or there are none.
        """


@dataclass(frozen=True)
class RoundOptions:
    """How rounds are run.

    `fraction` of the clients are asked; fewer than `min_replies` void the round. `secure` sums in
    secret (linear strategies). `clip` and `noise` make rounds differentially private: the norm of a
    change, and the noise's deviation over it. With noise every client is drawn by itself with
    probability `fraction` (Poisson sampling), from a secret seed. Epsilon is computed for exactly
    that. Every `evaluate_every` rounds, and after the last, clients evaluate the weights.
    """

    rounds: int = 10
    fraction: float = 1.0
    min_replies: int = 1
    secure: bool = False
    clip: float | None = None
    noise: float = 0.0
    delta: float = 1e-5
    seed: int = 0
    evaluate_every: int = 1


@dataclass(frozen=True)
class Round:
    """The record of a round. `epsilon` is the privacy spent so far, None without noise."""

    number: int
    accuracy: float | None
    client_accuracy: dict[int, float]
    asked: tuple[int, ...]
    answered: tuple[int, ...]
    refused: tuple[int, ...]
    sent_bytes: int
    received_bytes: int
    train_loss: float | None = None
    epsilon: float | None = None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        spread = sorted(self.client_accuracy.values())
        return {
            "round": self.number,
            "accuracy": self.accuracy,
            "client_accuracy": {
                str(client): value for client, value in self.client_accuracy.items()
            },
            "client_accuracy_worst": spread[0] if spread else None,
            "client_accuracy_median": statistics.median(spread) if spread else None,
            "asked": list(self.asked),
            "answered": list(self.answered),
            "refused": list(self.refused),
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "train_loss": self.train_loss,
            "epsilon": self.epsilon,
        }


@dataclass(frozen=True)
class RoundReplies:
    """The replies of a round: one change (numel,) from all clients, and the numbers of those that
    replied.

    Secure rounds have no single replies.
    """

    change: Tensor
    answered: tuple[int, ...]
    replies: tuple[Reply, ...]
    refused: Mapping[int, str]
    losses: tuple[float, ...]
    num_bytes: int


@dataclass
class Server:
    """The global weights (numel,) and the rule that moves them."""

    weights: Tensor
    strategy: Strategy
    options: RoundOptions
    seed: Callable[[], int] = field(
        default=lambda: secrets.randbits(63)
    )  # of draws and noise; alike on ranks of one server

    def run(self, fleet: Fleet, done: int = 0) -> Iterator[Round]:
        """Run all rounds after those that are `done`, giving what is known after each."""
        self._check()
        for number in range(done + 1, self.options.rounds + 1):
            yield self.round(fleet, number)

    def round(self, fleet: Fleet, number: int) -> Round:
        """One round. Raises `RunError` when fewer than `min_replies` clients answer; the weights
        are then as before.
        """
        clients = self._draw(fleet.num_clients, number)
        task = TrainTask(number, self.weights, self.strategy.extra(self.weights))
        received = (self._collect_sum if self.options.secure else self._collect)(
            fleet, task, clients
        )
        self.weights = self.strategy.apply(self.weights, received.change)
        self.strategy.note(received.replies)
        task_bytes = sum(v.numel() * v.element_size() for v in (task.weights, *task.extra.values()))
        evaluates = number % self.options.evaluate_every == 0 or number == self.options.rounds
        return Round(
            number,
            fleet.accuracy(self.weights),
            _known(fleet.accuracies(self.weights)) if evaluates else {},
            tuple(clients),
            received.answered,
            tuple(received.refused),
            sent_bytes=task_bytes * len(clients),
            received_bytes=received.num_bytes,
            train_loss=statistics.fmean(received.losses) if received.losses else None,
            epsilon=self._epsilon(number),
        )

    def _draw(self, num_clients: int, number: int) -> list[int]:
        options = self.options
        if options.noise:
            return draw(num_clients, options.fraction, self.seed())
        return choose(num_clients, options.fraction, options.seed, number)

    def _epsilon(self, number: int) -> float | None:
        options = self.options
        return (
            privacy.Accountant(options.fraction, options.noise).epsilon(number, options.delta)
            if options.noise
            else None
        )

    def _collect(self, fleet: Fleet, task: TrainTask, asked: Sequence[int]) -> RoundReplies:
        """The clients' changes, combined."""
        options = self.options
        replies, refused = self._accepted(fleet.train(task, asked))
        answered = tuple(reply.client for reply in replies)
        self._enough(task, asked, answered, refused)
        losses = tuple(
            reply.metrics["train_loss"] for reply in replies if "train_loss" in reply.metrics
        )
        num_bytes = sum(reply.num_bytes for reply in replies)
        if options.clip is None:
            change = self.strategy.combine(replies)
        else:  # the bound on one client's part holds only if none weighs more
            clipped = [privacy.clip(reply.change, options.clip) for reply in replies]
            total = torch.stack(clipped).sum(dim=0) if clipped else torch.zeros_like(self.weights)
            change = self._private(total, len(replies), fleet.num_clients)
        return RoundReplies(change, answered, tuple(replies), refused, losses, num_bytes)

    def _collect_sum(self, fleet: Fleet, task: TrainTask, asked: Sequence[int]) -> RoundReplies:
        """The sum of the clients' changes, from masked ones; clients clip their own, for no one
        else can.
        """
        if not asked:
            return RoundReplies(
                self._private(torch.zeros_like(self.weights), 0, fleet.num_clients),
                (),
                (),
                {},
                (),
                0,
            )
        received = secret_sum(fleet.secret, task, asked)
        self._enough(task, asked, received.answered, {})
        change = received.change.to(self.weights.dtype)
        if self.options.clip is None:
            change = (received.change / received.num_examples).to(self.weights.dtype)
        else:
            change = self._private(change, len(received.answered), fleet.num_clients)
        return RoundReplies(change, received.answered, (), {}, received.losses, received.num_bytes)

    def _private(self, total: Tensor, count: int, num_clients: int) -> Tensor:
        """The mean of clipped changes from their sum. With noise it is divided by the *expected*
        number of clients.

        H. B. McMahan et al., Learning Differentially Private Recurrent Language Models (ICLR 2018),
        algorithm 1. The number that happened to be drawn must not show.
        """
        options = self.options
        assert options.clip is not None
        if not options.noise:
            return total / count
        generator = torch.Generator().manual_seed(
            self.seed()
        )  # a seed that could be guessed would undo the noise
        return (total + privacy.noise(total, options.noise * options.clip, generator)) / (
            options.fraction * num_clients
        )

    def _enough(
        self,
        task: TrainTask,
        asked: Sequence[int],
        answered: Sequence[int],
        refused: Mapping[int, str],
    ) -> None:
        needed = (
            min(self.options.min_replies, len(asked))
            if self.options.noise
            else self.options.min_replies
        )
        if len(answered) < needed or (asked and not answered):
            raise RunError(
                f"round {task.number}: {len(answered)} of {len(asked)} clients answered, and "
                f"{needed} are needed" + "".join(f"; {why}" for why in refused.values())
            )

    def _check(self) -> None:
        if self.options.secure and not self.strategy.linear:
            raise RunError(
                "secure aggregation gives the server the mean alone; this strategy looks at single "
                "changes"
            )
        if self.options.noise and self.options.clip is None:
            raise RunError(
                "noise without clipping protects no client: set clip, the largest norm of a change"
            )
        if self.options.clip is not None and not self.strategy.linear:
            raise RunError(
                "privacy is counted for the mean of clipped changes; this strategy looks at single "
                "ones"
            )

    def _accepted(self, replies: list[Reply]) -> tuple[list[Reply], dict[int, str]]:
        """The replies that may be used, by client, and why others are not."""
        good = []
        refused = {}
        for reply in sorted(replies, key=lambda reply: reply.client):
            try:
                good.append(check_reply(reply, self.weights.numel()))
            except RunError as error:
                refused[reply.client] = str(error)
                say(f"plait: round {reply.number}: {error}; its reply is left out")
        return good, refused


def _known(accuracies: Mapping[int, float | None]) -> dict[int, float]:
    return {client: value for client, value in accuracies.items() if value is not None}


def choose(num_clients: int, fraction: float, seed: int, number: int) -> list[int]:
    """The clients of a round, ascending: a share of all, at least one, by a seed of the round."""
    count = max(1, round(fraction * num_clients))
    return sorted(random.Random(f"{seed} {number}").sample(range(num_clients), count))


def draw(num_clients: int, probability: float, seed: int) -> list[int]:
    """Poisson sampling: each client by itself, ascending; now and then none."""
    generator = random.Random(seed)
    return [client for client in range(num_clients) if generator.random() < probability]
