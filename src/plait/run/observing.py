"""The observers of a run beside its training: evaluations, and the trackers that it reports to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import PlaitError
from plait.run.assemble import make_eval_batches
from plait.run.ending import Ending, one_is_asked
from plait.run.evaluation import Evaluations
from plait.run.hooks import Hook
from plait.run.rundir import RunFolder
from plait.run.trackers import Trackers
from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.comm import World
    from plait.config import Config


@dataclass(frozen=True)
class Observers:
    """The evaluations of `[eval]`, on every rank, and the trackers of `[log]`, on rank 0."""

    evaluations: Evaluations | None
    trackers: Trackers | None
    folder: RunFolder | None

    @staticmethod
    def of(
        config: Config,
        plan: str,
        world: World,
        folder: RunFolder | None,
        ending: Ending | None,
    ) -> Observers:
        """The observers that a config names; a signal that `ending` knows of ends evaluations."""
        evaluations = None
        evaluation = config.eval
        if evaluation.every:
            evaluations = Evaluations(
                make_eval_batches(config, *world.worker),
                evaluation.every,
                folder,
                keep_best=evaluation.keep_best,
                patience=evaluation.patience,
                leaves_off=_never if ending is None else partial(one_is_asked, ending, world),
            )
        trackers = None
        if config.log.to and folder is not None and world.rank == 0:
            newest = (lambda: None) if evaluations is None else evaluations.newest
            trackers = Trackers(config.log.to, folder.path, config.as_dict(), plan, newest)
        return Observers(evaluations, trackers, folder)

    def hooks(self) -> list[Hook]:
        """The hooks, evaluations first."""
        both: list[Hook | None] = [self.evaluations, self.trackers]
        return [hook for hook in both if hook is not None]

    @property
    def ends(self) -> bool:
        """Whether evaluations have become no better for as long as `[eval] patience` says."""
        return self.evaluations is not None and self.evaluations.ends

    @property
    def is_left_off(self) -> bool:
        """Whether the evaluation of the last step was left off, for a signal."""
        return self.evaluations is not None and self.evaluations.is_left_off

    def numbers(self) -> JsonObject:
        """The newest evaluation, for the summary."""
        if self.evaluations is None or self.evaluations.last is None:
            return {}
        return {"eval": self.evaluations.last.as_dict()}

    def finish(self) -> None:
        """Close the trackers; those that keep files get the page of the run."""
        if self.trackers is not None:
            self.trackers.finish(self._page())

    def _page(self) -> Path | None:
        """The page of the run; None where it cannot be made."""
        from plait.run.report_page import report_page
        from plait.run.rundata import read_run

        if self.folder is None:
            return None
        page = self.folder.path / "report.html"
        try:
            page.write_text(report_page(read_run(self.folder.path)), encoding="utf-8")
        except (PlaitError, OSError):
            return None
        return page


def _never() -> bool:
    return False
