"""The server's loop: choose clients, send, wait for those that answer, combine, judge. It never sees a sample.

What runs the clients is behind `Fleet`: this process, a pool of processes, or Flower's nodes.
"""

from __future__ import annotations

import random
import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from plait.errors import RunError
from plait.federated import privacy, secure
from plait.federated.messages import Reply, Task, check_reply
from plait.federated.strategies import Strategy, weighted_mean


class Fleet(Protocol):
    """The clients."""

    num_clients: int

    def train(self, task: Task, clients: Sequence[int]) -> list[Reply]:
        """The replies of those clients that answer in time, in any order; others are simply missing."""

    def accuracies(self, weights: Tensor) -> dict[int, float]:
        """What each client says of the weights on test samples of its own."""

    def accuracy(self, weights: Tensor) -> float:
        """On the samples that the server holds out."""


@dataclass(frozen=True)
class Rules:
    """How rounds are run.

    `fraction` of the clients are asked; fewer than `min_replies` void the round. `secure` sums in secret (linear strategies).
    `clip` and `noise` make rounds differentially private: the norm of a change, and the noise's deviation over it.
    """

    rounds: int = 10
    fraction: float = 1.0
    min_replies: int = 1
    secure: bool = False
    clip: float | None = None
    noise: float = 0.0
    delta: float = 1e-5
    seed: int = 0


@dataclass(frozen=True)
class Round:
    """What is known after a round. `epsilon` is what it has cost so far, None without noise."""

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
            "client_accuracy": {str(client): value for client, value in self.client_accuracy.items()},
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


@dataclass
class Server:
    """The global weights and the rule that moves them."""

    weights: Tensor
    strategy: Strategy
    rules: Rules
    on_round: Callable[[Round], None] = field(default=lambda done: None)

    def run(self, fleet: Fleet) -> Iterator[Round]:
        """Run all rounds, giving what is known after each."""
        self._check()
        for number in range(1, self.rules.rounds + 1):
            done = self.round(fleet, number)
            self.on_round(done)
            yield done

    def round(self, fleet: Fleet, number: int) -> Round:
        """One round. Raises `RunError` when fewer than `min_replies` clients answer; the weights are then as before."""
        rules = self.rules
        asked = choose(fleet.num_clients, rules.fraction, rules.seed, number)
        task = Task(number, self.weights, self.strategy.extra(self.weights))
        replies, refused = self._accepted(fleet.train(task, asked))
        if len(replies) < rules.min_replies or not replies:
            raise RunError(
                f"round {number}: {len(replies)} of {len(asked)} clients answered, and {rules.min_replies} are needed"
                + "".join(f"; {why}" for why in refused.values())
            )
        self.weights = self.strategy.apply(self.weights, self._combined(replies, asked))
        self.strategy.note(replies)
        task_bytes = sum(v.numel() * v.element_size() for v in (task.weights, *task.extra.values()))
        losses = [reply.metrics["train_loss"] for reply in replies if "train_loss" in reply.metrics]
        return Round(
            number,
            fleet.accuracy(self.weights),
            fleet.accuracies(self.weights),
            tuple(asked),
            tuple(reply.client for reply in replies),
            tuple(refused),
            sent_bytes=task_bytes * len(asked),
            received_bytes=sum(reply.num_bytes for reply in replies),
            train_loss=statistics.fmean(losses) if losses else None,
            epsilon=privacy.Accountant(rules.fraction, rules.noise).epsilon(number, rules.delta) if rules.noise else None,
        )

    def _check(self) -> None:
        if self.rules.secure and not self.strategy.linear:
            raise RunError("secure aggregation gives the server the mean alone; this strategy looks at single changes")
        if self.rules.noise and self.rules.clip is None:
            raise RunError("noise without clipping protects nobody: set clip, the largest norm of a change")
        if self.rules.clip is not None and not self.strategy.linear:
            raise RunError("privacy is counted for the mean of clipped changes; this strategy looks at single ones")

    def _accepted(self, replies: list[Reply]) -> tuple[list[Reply], dict[int, str]]:
        """The replies that may be used, by client, and why others are not."""
        good, refused = [], {}
        for reply in sorted(replies, key=lambda reply: reply.client):
            try:
                good.append(check_reply(reply, self.weights.numel()))
            except RunError as error:
                refused[reply.client] = str(error)
        return good, refused

    def _combined(self, replies: list[Reply], asked: Sequence[int]) -> Tensor:
        rules = self.rules
        if rules.clip is not None:  # the bound on one client's part holds only if none weighs more
            replies = [replace(reply, change=privacy.clip(reply.change, rules.clip), num_examples=1) for reply in replies]
        if rules.secure:
            change = secure_mean(replies, set(asked))
        elif rules.clip is not None:
            change = weighted_mean(replies)
        else:
            change = self.strategy.combine(replies)
        if rules.clip is None or not rules.noise:
            return change
        generator = torch.Generator().manual_seed(secrets.randbits(63))  # a seed that could be guessed would undo the noise
        return change + privacy.noise(change, rules.noise * rules.clip / len(replies), generator)


def choose(num_clients: int, fraction: float, seed: int, number: int) -> list[int]:
    """The clients of a round, ascending: a share of all, at least one, by a seed of the round."""
    count = max(1, round(fraction * num_clients))
    return sorted(random.Random(f"{seed} {number}").sample(range(num_clients), count))


def secure_mean(replies: Sequence[Reply], asked: set[int]) -> Tensor:
    """The mean weighed by examples, from masked vectors; clients that were asked and are missing dropped out meanwhile."""
    like = replies[0].change
    vectors = {
        reply.client: secure.to_fixed(
            torch.cat([reply.change.double() * reply.num_examples, torch.tensor([reply.num_examples])])
        )
        for reply in replies
    }
    total = secure.from_fixed(secure.secure_sum(vectors, silent=asked - set(vectors)))
    return (total[:-1] / total[-1]).to(like.dtype)
