"""Hooks: what happens beside training, at five moments of a run.

The loop calls them in the order of the list, on every rank. A hook that stops the run raises. It
must do so alike on every rank, from values that are equal on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.engine.engine import Engine
    from plait.engine.step import StepResult


@dataclass(frozen=True)
class RunStart:
    """The beginning of a run: steps `first_step` to `last_step` are still to do, counted from 1."""

    engine: Engine
    loader: Any
    first_step: int
    last_step: int


@dataclass(frozen=True)
class BatchWait:
    """The time that a step waited for its batch, from `began_seconds` of `time.perf_counter` on.

    `was_ready`: the batch had been read when it was asked for.
    """

    began_seconds: float
    seconds: float
    was_ready: bool


@dataclass(frozen=True)
class StepDone:
    """One step that is done; `seconds` holds everything since the step before it, loading the batch
    included.

    `learning_rate` is that of the step, and `memory_bytes` what this rank holds after it.
    """

    step: int
    seconds: float
    result: StepResult
    learning_rate: float | None = None
    memory_bytes: int | None = None
    wait: BatchWait | None = None


class Hook:
    """The five moments; a hook defines those that it needs."""

    def on_start(self, start: RunStart) -> None:
        """Before the first step."""

    def needs_state(self, step: int) -> bool:
        """Whether `on_step` looks at more than the numbers of a step, as a checkpoint does.

        On a GPU, steps of which only numbers are wanted are told when the next one is under way. A
        hook that answers by itself does so alike on every rank.
        """
        return True

    def on_step(self, done: StepDone) -> None:
        """After each step."""

    def before_rollback(self) -> None:
        """The newest state that was kept is about to be loaded. On all ranks."""

    def on_rollback(self, step: int) -> None:
        """Training goes on after this earlier step; those since are done again."""

    def on_end(self) -> None:
        """After the last step; not called when the run fails."""

    def numbers(self) -> JsonObject:
        """The keys that the hook adds to the summary."""
        return {}
