"""Rollback: a step that is no number is done again from the last state that was kept.

`[recovery] on_nan = "back"`. The replay begins at the newest snapshot in memory, where the launcher
or the machines of the run hold one. Else it begins at the newest checkpoint of the run. It tells a
passing fault from a lasting one (`plait.engine.guard`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from plait.checkpoint.folder import newest_whole as newest_checkpoint
from plait.comm.shm.snapshot_head import newest_whole
from plait.doctor.findings import say
from plait.doctor.flight import Phase
from plait.run.hooks import Hook, RunStart, StepDone
from plait.run.rundir import RunFolder
from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.run.host_snapshots import HostSnapshots
    from plait.run.place import RankContext


class Rollback(Hook):
    """Loads the last state of a run into its engine and its loader. For all ranks.

    The first rank notes each in the folder of the run, which a later loss of ranks leaves there.

    Attributes:
        recoveries: the rollbacks of this process, in the form of the recoveries of a summary.
    """

    def __init__(
        self, folder: Path | None, place: RankContext | None, memory: HostSnapshots | None = None
    ) -> None:
        self.recoveries: list[JsonObject] = []
        self._folder = folder
        self._place = place
        self._memory = memory
        self._began: float | None = None

    def on_start(self, start: RunStart) -> None:
        """Learn what is loaded."""
        self._engine = start.engine
        self._loader = start.loader

    def needs_state(self, step: int) -> bool:
        return False

    def on_step(self, done: StepDone) -> None:
        """A step is finished: the last rollback is over."""
        if self._began is not None:
            self.recoveries[-1]["seconds"] = time.monotonic() - self._began
            self._began = None
            if self._folder is not None and self._engine.world.rank == 0:
                with RunFolder(self._folder).restarts.open("a") as file:
                    file.write(json.dumps(self.recoveries[-1]) + "\n")

    def go_back(self) -> int:
        """Load the state, and return its step. Collective."""
        engine = self._engine
        dropped = engine.step_index
        moment = time.time()
        self._began = time.monotonic()
        with engine.world.recorder.flight.during(Phase.STARTING):
            files = self._newest_snapshot()
            meta = self._load(files)
            if self._memory is not None:
                self._memory.forget_fetched()
        step = int(meta["step"])
        self._loader.load_state_dict(meta.get("loader", {}), step)
        engine.guard.rolled_back(step)
        cause = f"step {dropped} was no finite number"
        plan = str(engine.plan)
        self.recoveries.append(
            {
                "step": dropped - 1,
                "lost_ranks": [],
                "cause": cause,
                "seconds": None,
                "plan_before": plan,
                "plan_after": plan,
                "steps_repeated": dropped - 1 - step,
                "source": "snapshot" if files else "checkpoint",
                "moment": moment,
            }
        )
        if engine.world.rank == 0:
            say(f"{cause}; it is replayed from the state of step {step}")
        return step

    def _newest_snapshot(self) -> tuple[Path, ...]:
        """By rank, the files of the newest snapshot in memory; empty for none. Collective."""
        if self._place is not None:
            return newest_whole(self._place.assignment.parts)
        return () if self._memory is None else self._memory.newest_here()

    def _load(self, files: tuple[Path, ...]) -> JsonObject:
        """Fill the engine from the files of a snapshot, else a checkpoint; its meta data."""
        from plait.engine.state.snapshots import restore

        if files:
            return restore(self._engine, files)
        assert self._folder is not None
        world = self._engine.world
        newest = newest_checkpoint(self._folder) if world.rank == 0 else None
        path = world.axis("world").gather_objects(newest)[0]
        return self._engine.load(path)
