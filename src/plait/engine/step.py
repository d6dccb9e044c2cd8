"""The result of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.comm import Ledger
from plait.engine.balance import Load
from plait.trace import Timeline


@dataclass(frozen=True)
class StepResult:
    """One step, as this rank saw it.

    Attributes:
        loss: the mean over the global number of unmasked tokens (or samples); equal on all ranks.
        grad_norm: the global norm of its gradient, before clipping; equal on all ranks.
        tokens: of the global batch: the unmasked ones where the loss counts them, else all
            positions of its sequences. Without sequences of integers, its samples.
        count: the divisor of the loss: the number that it counts, or the samples.
        seconds: the time of the step on this rank.
        timeline: its actions and collectives.
        ledger: what this rank sent, by axis and operation.
        details: what the strategy adds, by name, as the staleness of this rank's gradient.
        load: where the tokens went, for a model with experts.
        loss_scale: what the loss was multiplied by in backward, where float16 needs that.
        skipped: whether that was too much, so that nothing was updated.

    Under `local` and `async-server` ranks do not step together, and loss and norm are this rank's
    own. At an outer step or a server's answer, loss and tokens cover all that it had not heard of.
    """

    loss: float
    grad_norm: float
    tokens: int
    count: float
    seconds: float
    timeline: Timeline
    ledger: Ledger
    details: Mapping[str, float] = field(default_factory=dict)
    load: Load | None = None
    loss_scale: float | None = None
    skipped: bool = False
