"""Everything that travels between the server and a client, and nothing else: this file is what
privacy is judged by.

Both records hold numbers and flat vectors over the parameters. A sample or a label has no field
that it could travel in. `check_reply` is asked of every reply, so this is true of every sent
message and not only of the declaration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.errors import PlaitError, RunError
from plait.launcher.main_process import say

METRICS = frozenset({"train_loss", "accuracy", "num_evaluated", "num_steps", "seconds"})


@dataclass(frozen=True)
class TrainTask:
    """From the server: round `number`, the global weights (numel,), and vectors that the strategy
    adds by name.
    """

    number: int
    weights: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """From a client: the change of the weights (numel,), how many examples it stands for, metrics,
    and extra vectors.
    """

    client: int
    number: int
    num_examples: int
    change: Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the reply's vectors."""
        return sum(
            vector.numel() * vector.element_size() for vector in (self.change, *self.extra.values())
        )


def check_reply(reply: Reply, numel: int) -> Reply:
    """The reply itself, if it holds vectors over the parameters and known metrics only.

    Raises `RunError` naming what is not allowed, and for values that are no finite numbers.
    """
    why = refusal(reply, numel)
    if why is not None:
        raise RunError(f"client {reply.client} sent {why}")
    return reply


def refusal(reply: Reply, numel: int) -> str | None:
    """The part of a reply that may not travel, for an error; None where all of it may."""
    for name, vector in {"change": reply.change, **reply.extra}.items():
        if vector.dim() != 1 or vector.numel() != numel:
            return f"'{name}' of shape {tuple(vector.shape)}; only ({numel},) may travel"
        if vector.is_floating_point() and not bool(torch.isfinite(vector).all()):
            return f"'{name}' with values that are no finite numbers"
    unknown = set(reply.metrics) - METRICS
    if unknown or not all(math.isfinite(value) for value in reply.metrics.values()):
        return f"metrics {dict(reply.metrics)}; allowed are finite {sorted(METRICS)}"
    return None


def tell_missing(client: int, error: PlaitError) -> None:
    """Say on stderr why a client has nothing to send in a round."""
    say(f"plait: client {client} has no answer: {error}")
