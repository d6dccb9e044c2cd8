"""Rules by which the server uses the clients' changes: one class each, over flat vectors.

`make` is the table of names.

    fedavg       the mean, weighed by examples                   McMahan et al. 2017, algorithm 1
    fedprox      the same; clients are held by mu/2 |x - x_0|^2  T. Li et al. 2020, algorithm 2
    fedavgm      the mean goes through a momentum                Hsu et al. 2019
    fedadam      the mean is a gradient for Adam                 Reddi et al. 2021, algorithm 2
    fedyogi      ... for Yogi                                    Reddi et al. 2021, algorithm 2
    scaffold     control variates against drift                  Karimireddy et al. 2020, algorithm
                                                                 1, option II
    trimmed      the mean without extremes, by coordinate        Yin et al. 2018
    median       the median, by coordinate                       Yin et al. 2018
    krum         the change nearest to the others                Blanchard et al. 2017

The robust rules do not weigh by examples: a client could claim any number of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import ConfigError, nearest
from plait.outer.federated.messages import Reply


@dataclass(frozen=True)
class StrategySettings:
    """The numbers of all rules; each takes its own.

    `lr`, `momentum`, `betas`, `tau`: of the server's optimizer (tau: its epsilon). `mu`: of
    fedprox. `trim`: the share of values cut off at each end. `num_bad`: the bad clients that krum
    must bear. `num_clients`: in all, for scaffold.
    """

    lr: float = 1.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3
    mu: float = 0.1
    trim: float = 0.2
    num_bad: int = 1
    num_clients: int = 1


class Strategy(ABC):
    """The server's rule over flat weights and changes (numel,). `linear`: only the weighed mean of
    the changes is looked at, so it may be summed in secret.
    """

    linear = True

    def __init__(self, settings: StrategySettings) -> None:
        self.settings = settings

    def extra(self, weights: Tensor) -> dict[str, Tensor]:
        """Vectors (numel,) that every client is sent beside the flat weights."""
        return {}

    def combine(self, replies: Sequence[Reply]) -> Tensor:
        """One change (numel,) from all; by default the mean weighed by examples, summed in the
        order of clients.
        """
        return weighted_mean(replies)

    @abstractmethod
    def apply(self, weights: Tensor, change: Tensor) -> Tensor:
        """The new weights (numel,), from the old and the combined change."""

    def note(self, replies: Sequence[Reply]) -> None:  # noqa: B027
        """Take what clients sent beside their changes."""

    def state(self) -> dict[str, Tensor]:
        """The state between rounds, to be saved: flat vectors (numel,) by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned: flat vectors (numel,) by name."""
        for name, value in state.items():
            setattr(self, name, value)


def weighted_mean(replies: Sequence[Reply]) -> Tensor:
    """Sum of n_i change_i over sum of n_i, (numel,), in the order of clients, whatever the order of
    arrival.
    """
    ordered = sorted(replies, key=lambda reply: reply.client)
    total = torch.zeros_like(ordered[0].change)
    for reply in ordered:
        total.add_(reply.change, alpha=reply.num_examples)
    return total.div_(sum(reply.num_examples for reply in ordered))


class FedAvg(Strategy):
    """x + lr d. FedProx is the same at the server."""

    def apply(self, weights: Tensor, change: Tensor) -> Tensor:
        return weights.add(change, alpha=self.settings.lr)


class FedAvgM(Strategy):
    """v = momentum v + d; x + lr v."""

    def __init__(self, settings: StrategySettings) -> None:
        super().__init__(settings)
        self.velocity: Tensor | None = None

    def apply(self, weights: Tensor, change: Tensor) -> Tensor:
        self.velocity = (
            change
            if self.velocity is None
            else self.velocity.mul(self.settings.momentum).add_(change)
        )
        return weights.add(self.velocity, alpha=self.settings.lr)


class Adaptive(Strategy):
    """m = b1 m + (1 - b1) d; v by the rule; x + lr m / (sqrt(v) + tau). v starts at tau^2, as in
    the paper.
    """

    def __init__(
        self, settings: StrategySettings, second_moment: Callable[[Tensor, Tensor, float], Tensor]
    ) -> None:
        super().__init__(settings)
        self._second_moment = second_moment
        self.first: Tensor | None = None
        self.second: Tensor | None = None

    def apply(self, weights: Tensor, change: Tensor) -> Tensor:
        beta1, beta2 = self.settings.betas
        first = torch.zeros_like(change) if self.first is None else self.first
        second = (
            torch.full_like(change, self.settings.tau**2) if self.second is None else self.second
        )
        self.first = beta1 * first + (1 - beta1) * change
        self.second = self._second_moment(second, change.square(), beta2)
        return weights + self.settings.lr * self.first / (self.second.sqrt() + self.settings.tau)


def adam_moment(second: Tensor, squared: Tensor, beta: float) -> Tensor:
    """beta v + (1 - beta) d^2, all (numel,)."""
    return beta * second + (1 - beta) * squared


def yogi_moment(second: Tensor, squared: Tensor, beta: float) -> Tensor:
    """v - (1 - beta) d^2 sign(v - d^2), all (numel,)."""
    return second - (1 - beta) * squared * torch.sign(second - squared)


class Scaffold(FedAvg):
    """Clients correct every gradient by c - c_i; the mean of their changes of c_i, times |S|/N,
    moves c.
    """

    linear = False

    def __init__(self, settings: StrategySettings) -> None:
        super().__init__(settings)
        self.control: Tensor | None = None

    def extra(self, weights: Tensor) -> dict[str, Tensor]:
        if self.control is None:
            self.control = torch.zeros_like(weights)
        return {"control": self.control}

    def combine(self, replies: Sequence[Reply]) -> Tensor:
        """The plain mean (numel,), as in the paper: the control variates are not weighed either."""
        return torch.stack(
            [reply.change for reply in sorted(replies, key=lambda reply: reply.client)]
        ).mean(dim=0)

    def note(self, replies: Sequence[Reply]) -> None:
        moved = [
            reply.extra["control"] for reply in sorted(replies, key=lambda reply: reply.client)
        ]
        assert self.control is not None
        self.control = self.control + torch.stack(moved).sum(dim=0) / self.settings.num_clients


class Robust(FedAvg):
    """A rule over the stacked changes (clients, numel)."""

    linear = False

    def __init__(
        self, settings: StrategySettings, rule: Callable[[Tensor, StrategySettings], Tensor]
    ) -> None:
        super().__init__(settings)
        self._rule = rule

    def combine(self, replies: Sequence[Reply]) -> Tensor:
        return self._rule(
            torch.stack([r.change for r in sorted(replies, key=lambda reply: reply.client)]),
            self.settings,
        )


def trimmed_mean(changes: Tensor, settings: StrategySettings) -> Tensor:
    """The mean of each coordinate without its `trim` largest and smallest shares: [clients, numel]
    -> [numel].
    """
    cut = min(int(settings.trim * len(changes)), (len(changes) - 1) // 2)
    return changes.sort(dim=0).values[cut : len(changes) - cut].mean(dim=0)


def median(changes: Tensor, settings: StrategySettings) -> Tensor:
    """The median of each coordinate; of an even number, the mean of the middle two: [clients,
    numel] -> [numel].
    """
    ordered = changes.sort(dim=0).values
    middle = len(changes) // 2
    return ordered[middle] if len(changes) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def krum(changes: Tensor, settings: StrategySettings) -> Tensor:
    """The change whose sum of squared distances to its n - f - 2 nearest neighbours is smallest:
    [clients, numel] -> [numel].
    """
    neighbours = max(1, len(changes) - settings.num_bad - 2)
    squared = torch.cdist(changes.double(), changes.double()).square()
    squared.fill_diagonal_(float("inf"))
    scores = squared.sort(dim=1).values[:, :neighbours].sum(dim=1)
    return changes[int(scores.argmin())]


STRATEGIES: Mapping[str, Callable[[StrategySettings], Strategy]] = {
    "fedavg": FedAvg,
    "fedprox": FedAvg,
    "fedavgm": FedAvgM,
    "fedadam": lambda settings: Adaptive(settings, adam_moment),
    "fedyogi": lambda settings: Adaptive(settings, yogi_moment),
    "scaffold": Scaffold,
    "trimmed": lambda settings: Robust(settings, trimmed_mean),
    "median": lambda settings: Robust(settings, median),
    "krum": lambda settings: Robust(settings, krum),
}


def make(name: str, settings: StrategySettings) -> Strategy:
    """The rule of that name. Errors: `ConfigError` naming the nearest."""
    if name not in STRATEGIES:
        raise ConfigError(f"federated.strategy '{name}' is unknown; {nearest(name, STRATEGIES)}")
    return STRATEGIES[name](settings)
