"""The result of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plait.comm import Ledger
from plait.engine.balance import Load
from plait.trace import Timeline


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step that its device computes; `StepResult` says what each is."""

    loss: float
    grad_norm: float
    tokens: int
    count: float
    load: Load | None = None
    skipped: bool = False


class Outcome:
    """Where the numbers of a step are told: with the step, or a step later."""

    def __init__(self, look: Callable[[], StepNumbers] | None = None) -> None:
        """`look` waits for what the device has computed, without other ranks."""
        self._look = look
        self._numbers: StepNumbers | None = None

    def tell(self, numbers: StepNumbers) -> None:
        """The numbers become known."""
        self._numbers = numbers
        self._look = None  # it holds the batch

    @property
    def is_told(self) -> bool:
        """Whether the host has decided on the step, or read the decision."""
        return self._numbers is not None

    @property
    def numbers(self) -> StepNumbers:
        """The numbers: those that were told, else those of the device."""
        if self._numbers is None:
            assert self._look is not None
            return self._look()
        return self._numbers


@dataclass(frozen=True)
class StepResult:
    """One step, as this rank saw it.

    On a GPU the host does not wait for a step: a look at `loss`, `grad_norm`, `tokens`, `count`,
    `load` or `skipped` does. There the next step raises an error for a loss that is no number. So
    does whatever needs the state, as a checkpoint.

    Attributes:
        outcome: where the numbers of the device are told.
        seconds: the time of the step on this rank; of a GPU's step, the host's part.
        timeline: its actions and collectives.
        ledger: what this rank sent, by axis and operation.
        details: what the strategy adds, by name, as the staleness of this rank's gradient.
        loss_scale: what the loss was multiplied by in backward, where float16 needs that.

    Under `local` and `async-server` ranks do not step together, and loss and norm are this rank's
    own. At an outer step or a server's answer, loss and tokens cover all that it had not heard of.
    """

    outcome: Outcome
    seconds: float
    timeline: Timeline
    ledger: Ledger
    details: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float | None = None

    def __repr__(self) -> str:
        """The numbers as a user prints them; those that a device still computes are not awaited."""
        if not self.outcome.is_told:
            return f"StepResult(under way, seconds={self.seconds:.4g})"
        return (
            f"StepResult(loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g}, "
            f"tokens={self.tokens}, seconds={self.seconds:.4g}"
            f"{', skipped' if self.skipped else ''})"
        )

    @property
    def loss(self) -> float:
        """The mean over the global number of unmasked tokens (or samples); equal on all ranks."""
        return self.outcome.numbers.loss

    @property
    def grad_norm(self) -> float:
        """The global norm of its gradient, before clipping; equal on all ranks."""
        return self.outcome.numbers.grad_norm

    @property
    def tokens(self) -> int:
        """Tokens of the global batch: the unmasked ones where the loss counts them, else all
        positions of its sequences. Without sequences of integers, its samples.
        """
        return self.outcome.numbers.tokens

    @property
    def count(self) -> float:
        """The divisor of the loss: the number that it counts, or the samples."""
        return self.outcome.numbers.count

    @property
    def load(self) -> Load | None:
        """Where the tokens went, for a model with experts."""
        return self.outcome.numbers.load

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated: float16's scale was too much, or `on_nan` dropped it."""
        return self.outcome.numbers.skipped


def void_result(timeline: Timeline, seconds: float) -> StepResult:
    """The result of a step that is not made, as an earlier state is to be loaded first."""
    outcome = Outcome()
    outcome.tell(StepNumbers(math.nan, math.nan, 0, 0.0, skipped=True))
    return StepResult(outcome, seconds, timeline, Ledger())
