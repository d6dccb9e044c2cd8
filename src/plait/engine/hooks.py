"""Hooks: what happens beside training, three moments of a run.

The loop calls them in the order of the list, on every rank. A hook that stops the run raises; it must do so alike on
every rank, from values that are equal on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.engine.step import StepResult


@dataclass(frozen=True)
class Start:
    """What a run begins with: steps `first_step` to `last_step` are still to do, counted from 1."""

    engine: Any
    loader: Any
    first_step: int
    last_step: int


@dataclass(frozen=True)
class StepDone:
    """One step that is done; `seconds` holds everything since the step before it, loading the batch included."""

    step: int
    seconds: float
    result: StepResult


class Hook:
    """The three moments; a hook defines those that it needs."""

    def on_start(self, start: Start) -> None:
        """Before the first step."""

    def on_step(self, done: StepDone) -> None:
        """After each step."""

    def on_end(self) -> None:
        """After the last step; not called when the run fails."""
