"""A run whose launcher keeps it alive: what each process does from one meeting to the next.

Every generation builds world, model and engine again, in survivors as in a rank that has just been
started: after a loss it is unknown what an interrupted step has left in buffers and hooks.
"""

from __future__ import annotations

import gc
import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.errors import PlaitError, RankFailed
from plait.launcher.seat import Assignment, Note, Seat
from plait.run import job as jobs
from plait.run.place import RANKS_ARE_BACK, RankContext
from plait.run.restarts import recoveries_of
from plait.run.rundir import RunFolder
from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.comm.severance import Severance
    from plait.launcher.board import Page

CUT_SECONDS = 2.0


def run(seat: Seat, job: jobs.TrainingRun) -> None:
    """Train in one generation after the other, until the launcher says that the run is done."""
    _prepare()
    note = Note()
    while (assignment := seat.meet(note)) is not None:
        note = _live_through(seat, assignment, job)
        gc.collect()  # an engine and its exceptions hold each other, and its connections


def _prepare() -> None:
    """Load what a generation needs, while those that are left still come to the meeting.

    Nothing of it is ever garbage, so collections between generations pass it over.
    """
    importlib.import_module("plait.run.preloaded")
    gc.freeze()


def run_apart(page: Page, job: jobs.TrainingRun) -> JsonObject:
    """Train in ranks that come and go, which end by themselves when a signal is on the page."""
    return jobs.run(job, page=page)


def _live_through(seat: Seat, assignment: Assignment, job: jobs.TrainingRun) -> Note:
    """The result of one generation, or why it ended. Raises what ends the run."""
    from plait.comm.severance import Severance

    severance = Severance()
    place = RankContext(seat, assignment, severance)
    own = replace(job, plan=assignment.plan.text)
    with seat.watching(severance.cut):
        try:
            result = jobs.run(own, place)
        except Exception as error:
            if not seat.goes_on or not _is_of_a_loss(error, severance):
                raise
            place.meet()
            return Note(reason=f"{error}")
        finally:
            severance.forget()
            place.copier.close()
    if result.get("signal") == 0:
        place.meet()
        return Note(reason=RANKS_ARE_BACK)
    if "stopped" in result:
        folder = None if job.folder is None else RunFolder(job.folder)
        result = {**result, "recoveries": recoveries_of(folder, place)}
    return Note(result=result, is_done=True)


def _is_of_a_loss(error: Exception, severance: Severance) -> bool:
    """Whether an error comes from a rank that is lost, and not from this one's own work."""
    if isinstance(error, RankFailed):
        return True
    return not isinstance(error, PlaitError) and severance.wait(CUT_SECONDS)
