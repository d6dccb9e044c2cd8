"""What strategies that are not in lock-step are told: the bound, the period, and how the outer step
is made.

Apart from `strategy`, and without torch, so that an engine's options can carry it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COMPRESSIONS: Final = ("none", "int8")
STALENESS_RATES: Final = ("constant", "inverse")


@dataclass(frozen=True)
class Change:
    """What an optimizer is asked for: the step, the factor on the gradients, and the factor on the
    learning rate.
    """

    step: int
    factor: float
    rate: float = 1.0


@dataclass(frozen=True)
class Asynchrony:
    """The plan's `staleK` and `everyH`, and what a plan does not say.

    Attributes:
        stale: the most updates by which a worker's weights may lag (async-server).
        every: local steps between two outer steps (local).
        outer_lr, outer_momentum: of the outer step, Nesterov's where there is momentum. 1 and 0 are
        plain averaging;
            DiLoCo has 0.7 and 0.9.
        compress: how the differences travel: `none`, or `int8` with error feedback.
        staleness_rate: the factor on the learning rate of an update whose gradient is t updates
        old: 1, or 1 / (1 + t). patience_seconds: how long workers wait for one that holds them up
        before it counts as lost.
    """

    stale: int = 0
    every: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    compress: str = "none"
    staleness_rate: str = "constant"
    patience_seconds: float = 120.0
