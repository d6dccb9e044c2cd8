"""Hooks: what happens beside training, at four moments of a run.

The loop calls them in the order of the list, on every rank. A hook that stops the run raises. It
must do so alike on every rank, from values that are equal on all of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.checkpoint.folder import keep_newest
from plait.run.rundir import RunFolder

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
class StepDone:
    """One step that is done; `seconds` holds everything since the step before it, loading the batch
    included.
    """

    step: int
    seconds: float
    result: StepResult


class Hook:
    """The four moments; a hook defines those that it needs."""

    def on_start(self, start: RunStart) -> None:
        """Before the first step."""

    def on_step(self, done: StepDone) -> None:
        """After each step."""

    def on_rollback(self, step: int) -> None:
        """Training goes on after this earlier step; those since are done again."""

    def on_end(self) -> None:
        """After the last step; not called when the run fails."""

    def numbers(self) -> dict[str, Any]:
        """The keys that the hook adds to the summary."""
        return {}


class Checkpoints(Hook):
    """Save into the run's folder every `every` steps (0: never in between) and after the last. On
    all ranks.

    Of the checkpoints the `keep` newest stay (0: all). With `saves_start` there is one before the
    first step, too.
    """

    def __init__(
        self, folder: RunFolder, every: int = 0, keep: int = 0, *, saves_start: bool = False
    ) -> None:
        self.folder = folder
        self.every = every
        self.keep = keep
        self._saves_start = saves_start
        self._saved = 0
        self._num = 0
        self._seconds = 0.0

    def on_start(self, start: RunStart) -> None:
        """Learn what to save. A rank that has joined the others at a step saves it with them."""
        self._start = start
        self._step = start.first_step - 1
        self._saved = self._step
        if self._saves_start and not self._is_saved():
            self._save()
        membership = start.engine.world.membership
        has_steps_left = self._step < start.last_step
        if membership is not None and membership.joined_late and has_steps_left:
            self._save_if_due()

    def on_rollback(self, step: int) -> None:
        """Steps that are done again are saved again."""
        self._step = step
        self._saved = min(self._saved, step)

    def on_step(self, done: StepDone) -> None:
        """Save when it is time to."""
        self._step = done.step
        self._save_if_due()

    def on_end(self) -> None:
        """Save the last step unless that has just happened."""
        if self._step > self._saved or self._ends_before_its_first_step():
            self._save()

    def _ends_before_its_first_step(self) -> bool:
        """Whether a run that has steps left ends with nothing in its folder to go on from."""
        return self._step < self._start.last_step and not self._is_saved()

    def numbers(self) -> dict[str, Any]:
        """The number of checkpoints, and the seconds that steps of this rank waited for them."""
        return {"checkpoints": {"count": self._num, "seconds": self._seconds}}

    def _is_saved(self) -> bool:
        """Whether the step has a checkpoint in the folder. Collective: rank 0 looks."""
        path = self.folder.checkpoint(self._step)
        told: list[bool] = self._start.engine.world.axis("world").gather_objects(path.exists())
        return told[0]

    def _save_if_due(self) -> None:
        if self.every and self._step % self.every == 0:
            self._save()

    def _save(self) -> None:
        began = time.perf_counter()
        path = self.folder.checkpoint(self._step)
        engine = self._start.engine
        engine.save(path, loader=self._start.loader.state_dict())
        self._saved = self._step
        self._num += 1
        self._seconds += time.perf_counter() - began
        if self.keep and engine.world.rank == 0:
            keep_newest(path.parent, self.keep)
