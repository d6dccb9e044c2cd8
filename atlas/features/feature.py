"""One feature of a framework: functions that use it, and the answer that is expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plait.verify.outside.source import FunctionSource, carried
from plait.verify.outside.task import Trial

Function = Callable[..., Any]
STEPS = 2


@dataclass(frozen=True)
class Feature:
    """`expected` are words of the answer; by default that the step is equal to one device.

    `step` is `train_step(state, batch, loss)`, or a loop `train(state, batches, loss)`.
    """

    name: str
    make: Function
    prepare: Function
    step: Function
    nproc: int = 2
    dtype: str = "float64"
    expected: str = "equal"

    @property
    def trial(self) -> Trial:
        """The question for verify."""
        return Trial(self.source, STEPS, self.dtype)

    @property
    def source(self) -> FunctionSource:
        """The functions, which travel to the ranks by value."""
        return carried(self.make, self.step, self.prepare)
