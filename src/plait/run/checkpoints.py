"""The checkpoints of a run: in between they are written behind its back, at its end it waits.

Steps wait for the checkpoint before, where that is still being written. The state is copied beside
the next step, and the ranks agree beside it too. Ranks that do not step together save in their own
time, and wait for the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from plait.checkpoint.folder import keep_newest
from plait.doctor.findings import say
from plait.doctor.flight import Phase
from plait.launcher.board import Waited
from plait.plan.facts import SCHEDULES
from plait.run.costs import WaitedFor
from plait.run.hooks import Hook, RunStart, StepDone
from plait.run.rundir import RunFolder
from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.checkpoint.behind import BackgroundSave


class Checkpoints(Hook):
    """Save into the run's folder every `every` steps (0: never in between) and after the last. On
    all ranks.

    Of the checkpoints the `keep` newest stay (0: all). With `saves_start` there is one before the
    first step, too. `account` gives where time is noted that is spent on them. `is_beside`:
    nothing but the engine's steps changes the state, so that it may be copied beside the next.
    """

    def __init__(
        self,
        folder: RunFolder,
        every: int = 0,
        keep: int = 0,
        *,
        saves_start: bool = False,
        is_beside: bool = False,
        account: Callable[[Waited], WaitedFor] = WaitedFor,
    ) -> None:
        self.folder = folder
        self.every = every
        self.keep = keep
        self._saves_start = saves_start
        self._saved = 0
        self._is_beside = is_beside
        self._waited = account(Waited.CHECKPOINTS)
        self._ending = account(Waited.LAST_CHECKPOINT)
        self._writing = account(Waited.WRITING)
        self._pending: BackgroundSave | None = None
        self._sweep = partial(_sweep, folder.checkpoint(0).parent, keep)

    def on_start(self, start: RunStart) -> None:
        """Learn what to save. A rank that has joined the others at a step saves it with them."""
        from plait.checkpoint.behind import set_aside
        from plait.engine.state.saves_behind import SavesBehind

        self._start = start
        self._step = start.first_step - 1
        self._saved = self._step
        world = start.engine.world
        self._is_beside &= not SCHEDULES[start.engine.plan.pp.schedule].asynchronous
        self._is_behind = start.engine.driver.is_synchronous and world.membership is None
        if self._is_behind:
            self._saves = SavesBehind(start.engine)
            if world.rank == 0:
                set_aside(self._path.parent)
        if self._saves_start and not self._is_saved():
            self._save()
        if self._joined_late():
            self._save_if_due()

    def before_rollback(self) -> None:
        """The newest checkpoint is whole before it is looked for. Collective."""
        with _timed(self._waited):
            self._wait_for_saves()

    def on_rollback(self, step: int) -> None:
        """Steps that are done again are saved again."""
        self._step = step
        self._saved = min(self._saved, step)

    def needs_state(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def on_step(self, done: StepDone) -> None:
        """Save when it is time to."""
        self._step = done.step
        self._save_if_due()

    def on_end(self) -> None:
        """Save the last step unless that has happened, and wait for all that is being written.

        A run may have been lost between its last step and this save.
        """
        with _timed(self._ending):
            whole = self._wait_for_saves()
            if not whole or self._step > self._saved or not self._is_saved():
                self._write()
                self._waited.add(0.0)
        if self._is_behind and self._start.engine.world.rank == 0:
            from plait.checkpoint.behind import remove_tombstones

            remove_tombstones(self._path.parent)

    def numbers(self) -> JsonObject:
        """The number of checkpoints, and what this rank has spent on them.

        `seconds` are those that steps waited, `processor_seconds` those beside the steps. The run
        waited `end_seconds` for its last one, after its last step.
        """
        cost = {
            "count": self._waited.count,
            "seconds": self._waited.seconds,
            "end_seconds": self._ending.seconds,
            "processor_seconds": self._writing.seconds,
        }
        return {"checkpoints": cost}

    def _joined_late(self) -> bool:
        membership = self._start.engine.world.membership
        has_steps_left = self._step < self._start.last_step
        return membership is not None and membership.joined_late and has_steps_left

    def _save_if_due(self) -> None:
        if not self.every or self._step % self.every:
            return
        if self._is_behind:
            self._save_behind()
        else:
            self._save()

    @property
    def _path(self) -> Path:
        return self.folder.checkpoint(self._step)

    def _is_saved(self) -> bool:
        """Whether the step has a checkpoint in the folder. Rank 0 looks, where all save at once."""
        if not self._is_behind:
            return self._path.exists()
        told: list[bool] = self._start.engine.world.axis("world").gather_objects(
            self._path.exists()
        )
        return told[0]

    def _save(self) -> None:
        """Save, and return when the checkpoint is whole."""
        with _timed(self._waited, count=1):
            self._write()

    def _write(self) -> None:
        engine = self._start.engine
        engine.save(self._path, loader=self._start.loader.state_dict())
        self._saved = self._step
        if engine.world.rank == 0:
            self._sweep()

    def _save_behind(self) -> None:
        """Have the state copied and written while training goes on."""
        engine = self._start.engine
        with _timed(self._waited, count=1):
            self._await()
            engine.flush()
            meta = {"loader": self._start.loader.state_dict()}
            with engine.world.recorder.flight.during(Phase.SAVING):
                self._pending = self._saves.begin(self._path, meta, self._sweep)
            self._saved = self._step
        if self._is_beside:
            engine.copies.add(self._wait_for_copy)
        else:
            self._wait_for_copy()

    def _wait_for_copy(self) -> None:
        """Wait until the state is copied."""
        if self._pending is not None:
            with _timed(self._waited):
                self._pending.wait_for_copy()

    def _await(self) -> str | None:
        """Wait for what this rank is writing. A failed checkpoint is one printed line; another rank
        that is why adds its reason.
        """
        pending = self._pending
        self._pending = None
        if pending is None:
            return None
        engine = self._start.engine
        with engine.world.recorder.flight.during(Phase.SAVING):
            pending.wait()
        self._writing.add(pending.processor_seconds)
        rank = engine.world.rank
        if pending.failure is not None and rank == 0:
            say(f"{pending.checkpoint} was not saved, and the run goes on: {pending.failure}")
        elif pending.is_own:
            say(f"rank {rank} could not write its part of {pending.checkpoint}: {pending.failure}")
        return pending.failure

    def _wait_for_saves(self) -> bool:
        """Wait until no rank is writing; whether the newest checkpoint was published. Collective
        where saves are behind.
        """
        if not self._is_behind:
            return True
        failure = self._await()
        told: list[str | None] = self._start.engine.world.axis("world").gather_objects(failure)
        return told[0] is None


def _sweep(folder: Path, keep: int) -> None:
    """Remove the oldest checkpoints."""
    if keep:
        keep_newest(folder, keep)


@contextmanager
def _timed(account: WaitedFor, count: int = 0) -> Iterator[None]:
    """Note the seconds inside, for so many more checkpoints."""
    began = time.perf_counter()
    yield
    account.add(time.perf_counter() - began, count)
