"""The recoveries of a run that its launcher does not know: one line each, in a file of its folder.

A restart by torchrun ends every process of the run, so only its folder knows what was before. So it
does of a rollback, where ranks are lost later.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from plait.run.hooks import Hook, StepDone
from plait.run.json_lines import rows_of
from plait.run.rundir import RunFolder
from plait.run.runfiles import RecoveryRecord
from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.run.place import RankContext

CAUSE = "torchrun started the run again"


class Restarted(Hook):
    """Notes a restart, and the seconds between the last step before it and its first. For the first
    rank.

    `plan_before` and the steps that were done are those that the folder tells of. `source` is what
    the run goes on from, and `first` the steps that are done there.
    """

    def __init__(self, folder: RunFolder, plan: str, source: str, first: int) -> None:
        self._file = folder.restarts
        steps_done = _steps_done(folder)
        self._is_told = False
        self._record: JsonObject = {
            "step": max(steps_done, first),
            "lost_ranks": [],
            "cause": CAUSE,
            "seconds": None,
            "plan_before": folder.plan_text or plan,
            "plan_after": plan,
            "steps_repeated": max(0, steps_done - first),
            "source": source,
            "moment": folder.metrics.stat().st_mtime if steps_done else time.time(),
        }

    def needs_state(self, step: int) -> bool:
        return False

    def on_step(self, done: StepDone) -> None:
        """The run goes on."""
        if self._is_told:
            return
        self._is_told = True
        self._record["seconds"] = time.time() - self._record["moment"]
        with self._file.open("a") as file:
            file.write(json.dumps(self._record) + "\n")


def restarted(folder: RunFolder, plan: str, source: str, first: int) -> list[Hook]:
    """The hook of a restart, made while the folder still tells of the run before."""
    return [Restarted(folder, plan, source, first)]


def recoveries_of(
    folder: RunFolder | None, place: RankContext | None, rollbacks: Sequence[JsonObject] = ()
) -> list[JsonObject]:
    """The recoveries of a run until now: those in its folder, then those by its own launcher.

    A run without a folder has the `rollbacks` of this process alone.
    """
    noted = rollbacks if folder is None else filter(_is_recovery, rows_of(folder.restarts))
    return [*noted, *([] if place is None else place.recoveries())]


def _is_recovery(row: JsonObject) -> bool:
    """Whether a line tells of a recovery; a crash or a full disk may have damaged it."""
    try:
        RecoveryRecord.model_validate(row)
    except ValidationError:
        return False
    return "seconds" in row


def _steps_done(folder: RunFolder) -> int:
    """The last step that the folder tells of."""
    steps = [row.get("step") for row in rows_of(folder.metrics)]
    return max((step for step in steps if isinstance(step, int)), default=0)
