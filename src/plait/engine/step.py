"""What a step gives back."""

from __future__ import annotations

from dataclasses import dataclass

from plait.comm import Ledger
from plait.engine.balance import Load
from plait.trace import Timeline


@dataclass(frozen=True)
class StepResult:
    """One step, as this rank saw it.

    Attributes:
        loss: the mean over the global number of unmasked tokens (or samples); equal on all ranks.
        grad_norm: the global norm of its gradient, before clipping; equal on all ranks.
        tokens: that global number.
        seconds: the time of the step on this rank.
        timeline: its actions and collectives.
        ledger: what this rank sent, by axis and operation.
        load: where the tokens went, for a model with experts.
    """

    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    timeline: Timeline
    ledger: Ledger
    load: Load | None = None
