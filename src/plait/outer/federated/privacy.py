"""Differential privacy of clients: clip, add Gaussian noise, and count what it has cost.

Each change is clipped to norm C; the sum of all gets noise of standard deviation z C, once. One
client's part in a round is then a subsampled Gaussian mechanism with rate q and noise multiplier z.
Its Renyi divergence of integer order a is (I. Mironov, K. Talwar, L. Zhang, Renyi Differential
Privacy of the Sampled Gaussian Mechanism, 2019, section 3.3)

    log( sum_k C(a, k) (1-q)^(a-k) q^k exp((k^2 - k) / (2 z^2)) ) / (a - 1)

Rounds add up; `epsilon` is the best over orders of the conversion of C. Canonne, G. Kamath, T.
Steinke (2020, proposition 12).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ORDERS: Sequence[int] = (*range(2, 64), 72, 80, 96, 128, 192, 256, 512)


def clip(change: Tensor, norm: float) -> Tensor:
    """The change, flat or of any shape, made shorter if it is longer than `norm`."""
    length = float(change.norm())
    return change * (norm / length) if length > norm else change


def noise(like: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Independent Gaussian noise of that standard deviation, of the shape of `like`."""
    return (
        torch.randn(like.shape, generator=generator, dtype=torch.float64)
        .mul_(deviation)
        .to(like.dtype)
    )


def renyi(rate: float, multiplier: float, order: int) -> float:
    """The Renyi divergence of one round at an integer order, in nats."""
    if multiplier <= 0:
        return math.inf
    if rate >= 1:
        return order / (2 * multiplier**2)
    terms = [
        math.lgamma(order + 1)
        - math.lgamma(k + 1)
        - math.lgamma(order - k + 1)
        + (order - k) * math.log1p(-rate)
        + (k * math.log(rate) if k else 0.0)
        + (k * k - k) / (2 * multiplier**2)
        for k in range(order + 1)
    ]
    largest = max(terms)
    return (largest + math.log(sum(math.exp(term - largest) for term in terms))) / (order - 1)


@dataclass(frozen=True)
class Accountant:
    """Counts rounds of one mechanism: each client takes part with probability `rate`, noise
    multiplier `multiplier`.
    """

    rate: float
    multiplier: float

    def epsilon(self, rounds: int, delta: float) -> float:
        """The epsilon of (epsilon, delta)-differential privacy after `rounds` rounds."""
        if rounds == 0:
            return 0.0

        def converted(order: int) -> float:
            divergence = rounds * renyi(self.rate, self.multiplier, order)
            return (
                divergence
                + math.log1p(-1 / order)
                - (math.log(delta) + math.log(order)) / (order - 1)
            )

        return max(0.0, min(converted(order) for order in ORDERS))
