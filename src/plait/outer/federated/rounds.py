"""The server's loop: choose clients, send, wait for those that answer, combine, judge. It never
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
from plait.outer.federated import privacy
from plait.outer.federated.messages import Reply, Task, check_reply
from plait.outer.federated.secret_round import Said, secret_sum
from plait.outer.federated.strategies import Strategy


class Fleet(Protocol):
    """The clients."""

    num_clients: int

    def train(self, task: Task, clients: Sequence[int]) -> list[Reply]:
        """The replies of those clients that answer in time, in any order; others are simply
        missing.
        """

    def secret(self, phase: str, contents: Mapping[int, Said]) -> dict[int, Said]:
        """The answers of those clients that are there to one step of secure aggregation."""

    def accuracies(self, weights: Tensor) -> dict[int, float]:
        """The accuracy of the weights on test samples of each client."""

    def accuracy(self, weights: Tensor) -> float:
        """The accuracy of the weights on the samples that the server holds out."""


@dataclass(frozen=True)
class Rules:
    """How rounds are run.

    `fraction` of the clients are asked; fewer than `min_replies` void the round. `secure` sums in
    secret (linear strategies). `clip` and `noise` make rounds differentially private: the norm of a
    change, and the noise's deviation over it. With noise every client is drawn by itself with
    probability `fraction` (Poisson sampling), from a secret seed. Epsilon is computed for exactly
    that. Every `evaluate_every` rounds, and after the last, clients judge the weights.
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
    accuracy: float
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
class Heard:
    """The replies of a round: one change from all clients, and the numbers of those that replied.

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
    """The global weights and the rule that moves them."""

    weights: Tensor
    strategy: Strategy
    rules: Rules
    on_round: Callable[[Round], None] = field(default=lambda done: None)
    seed: Callable[[], int] = field(
        default=lambda: secrets.randbits(63)
    )  # of draws and noise; alike on ranks of one server

    def run(self, fleet: Fleet) -> Iterator[Round]:
        """Run all rounds, giving what is known after each."""
        self._check()
        for number in range(1, self.rules.rounds + 1):
            done = self.round(fleet, number)
            self.on_round(done)
            yield done

    def round(self, fleet: Fleet, number: int) -> Round:
        """One round. Raises `RunError` when fewer than `min_replies` clients answer; the weights
        are then as before.
        """
        asked = self._draw(fleet.num_clients, number)
        task = Task(number, self.weights, self.strategy.extra(self.weights))
        heard = (self._hear_sum if self.rules.secure else self._hear)(fleet, task, asked)
        self.weights = self.strategy.apply(self.weights, heard.change)
        self.strategy.note(heard.replies)
        task_bytes = sum(v.numel() * v.element_size() for v in (task.weights, *task.extra.values()))
        judged = number % self.rules.evaluate_every == 0 or number == self.rules.rounds
        return Round(
            number,
            fleet.accuracy(self.weights),
            fleet.accuracies(self.weights) if judged else {},
            tuple(asked),
            heard.answered,
            tuple(heard.refused),
            sent_bytes=task_bytes * len(asked),
            received_bytes=heard.num_bytes,
            train_loss=statistics.fmean(heard.losses) if heard.losses else None,
            epsilon=self._epsilon(number),
        )

    def _draw(self, num_clients: int, number: int) -> list[int]:
        rules = self.rules
        if rules.noise:
            return draw(num_clients, rules.fraction, self.seed())
        return choose(num_clients, rules.fraction, rules.seed, number)

    def _epsilon(self, number: int) -> float | None:
        rules = self.rules
        return (
            privacy.Accountant(rules.fraction, rules.noise).epsilon(number, rules.delta)
            if rules.noise
            else None
        )

    def _hear(self, fleet: Fleet, task: Task, asked: Sequence[int]) -> Heard:
        """The clients' changes, combined."""
        rules = self.rules
        replies, refused = self._accepted(fleet.train(task, asked))
        answered = tuple(reply.client for reply in replies)
        self._enough(task, asked, answered, refused)
        losses = tuple(
            reply.metrics["train_loss"] for reply in replies if "train_loss" in reply.metrics
        )
        num_bytes = sum(reply.num_bytes for reply in replies)
        if rules.clip is None:
            change = self.strategy.combine(replies)
        else:  # the bound on one client's part holds only if none weighs more
            clipped = [privacy.clip(reply.change, rules.clip) for reply in replies]
            total = torch.stack(clipped).sum(dim=0) if clipped else torch.zeros_like(self.weights)
            change = self._private(total, len(replies), fleet.num_clients)
        return Heard(change, answered, tuple(replies), refused, losses, num_bytes)

    def _hear_sum(self, fleet: Fleet, task: Task, asked: Sequence[int]) -> Heard:
        """The sum of the clients' changes, from masked ones; clients clip their own, for nobody
        else can.
        """
        if not asked:
            return Heard(
                self._private(torch.zeros_like(self.weights), 0, fleet.num_clients),
                (),
                (),
                {},
                (),
                0,
            )
        heard = secret_sum(fleet.secret, task, asked)
        self._enough(task, asked, heard.answered, {})
        change = heard.change.to(self.weights.dtype)
        if self.rules.clip is None:
            change = (heard.change / heard.num_examples).to(self.weights.dtype)
        else:
            change = self._private(change, len(heard.answered), fleet.num_clients)
        return Heard(change, heard.answered, (), {}, heard.losses, heard.num_bytes)

    def _private(self, total: Tensor, count: int, num_clients: int) -> Tensor:
        """The mean of clipped changes from their sum. With noise it is divided by the *expected*
        number of clients.

        H. B. McMahan et al., Learning Differentially Private Recurrent Language Models (ICLR 2018),
        algorithm 1. The number that happened to be drawn must not show.
        """
        rules = self.rules
        assert rules.clip is not None
        if not rules.noise:
            return total / count
        generator = torch.Generator().manual_seed(
            self.seed()
        )  # a seed that could be guessed would undo the noise
        return (total + privacy.noise(total, rules.noise * rules.clip, generator)) / (
            rules.fraction * num_clients
        )

    def _enough(
        self, task: Task, asked: Sequence[int], answered: Sequence[int], refused: Mapping[int, str]
    ) -> None:
        needed = (
            min(self.rules.min_replies, len(asked)) if self.rules.noise else self.rules.min_replies
        )
        if len(answered) < needed or (asked and not answered):
            raise RunError(
                f"round {task.number}: {len(answered)} of {len(asked)} clients answered, and "
                f"{needed} are needed" + "".join(f"; {why}" for why in refused.values())
            )

    def _check(self) -> None:
        if self.rules.secure and not self.strategy.linear:
            raise RunError(
                "secure aggregation gives the server the mean alone; this strategy looks at single "
                "changes"
            )
        if self.rules.noise and self.rules.clip is None:
            raise RunError(
                "noise without clipping protects nobody: set clip, the largest norm of a change"
            )
        if self.rules.clip is not None and not self.strategy.linear:
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
        return good, refused


def choose(num_clients: int, fraction: float, seed: int, number: int) -> list[int]:
    """The clients of a round, ascending: a share of all, at least one, by a seed of the round."""
    count = max(1, round(fraction * num_clients))
    return sorted(random.Random(f"{seed} {number}").sample(range(num_clients), count))


def draw(num_clients: int, probability: float, seed: int) -> list[int]:
    """Poisson sampling: each client by itself, ascending; now and then nobody."""
    generator = random.Random(seed)
    return [client for client in range(num_clients) if generator.random() < probability]
