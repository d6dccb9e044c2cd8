"""Options of the drivers whose ranks do not step together: bound, period and outer step.

No torch is imported, so that the options of an engine can hold the record as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COMPRESSIONS: Final = ("none", "int8")
STALENESS_RATES: Final = ("constant", "inverse")


@dataclass(frozen=True)
class Asynchrony:
    """The plan's `staleK` and `everyH`, and the numbers that a plan does not say.

    Attributes:
        stale: the most updates by which a worker's weights may lag (async-server).
        every: local steps between two outer steps (local).
        outer_lr: learning rate of the outer step; 1 without momentum is plain averaging.
        outer_momentum: momentum of the outer step, Nesterov's. DiLoCo has 0.7 and 0.9.
        compress: the form in which differences travel: `none`, or `int8` with error feedback.
        staleness_rate: factor on the learning rate of an update whose gradient is t updates old:
            `constant` is 1, `inverse` is 1 / (1 + t).
        patience_seconds: time that workers wait for a slow one before it counts as lost.
    """

    stale: int = 0
    every: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    compress: str = "none"
    staleness_rate: str = "constant"
    patience_seconds: float = 120.0
