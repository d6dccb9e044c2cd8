"""The watch over a run: in the launcher, or in the ranks of a world that others have started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plait.doctor.watcher import SLOW_SECONDS, HangLimits, Watcher
from plait.errors import PlaitError, RankFailed
from plait.plan import Plan
from plait.plan.facts import STRATEGIES
from plait.run.rundir import RunFolder

SILENT_SECONDS: Final = 300.0


@dataclass(frozen=True)
class Supervision:
    """How a run is watched over: its plan, `[recovery] hang_seconds`, its folder.

    `by_ranks` says that no launcher watches, so that the ranks do.
    """

    plan: str
    hang_seconds: float | None
    folder: Path | None
    by_ranks: bool = False

    @property
    def limits(self) -> HangLimits:
        """The limits of the run. Ranks that do not step together are not ended: others go on."""
        together = STRATEGIES[Plan.parse(self.plan).dp.strategy].synchronous
        return HangLimits(self.hang_seconds, ends=together)

    @property
    def silent_seconds(self) -> float:
        """The seconds after which a communication fails by itself.

        Where a watcher ends what hangs, it is the last resort: a rank may take long to compile.
        """
        if self.limits.ends and (self.folder is not None or self.by_ranks):
            return 2 * SLOW_SECONDS
        return SILENT_SECONDS if self.hang_seconds is None else self.hang_seconds

    @contextlib.contextmanager
    def outside(self) -> Iterator[Watcher | None]:
        """Watch over the ranks that this process launches. A hang that ended one is the error.

        The watcher; None where there is none.

        Raises:
            RankFailed: a hang ended a rank.
        """
        if self.folder is None or self.by_ranks:
            yield None
            return
        with Watcher(RunFolder(self.folder).doctor, self.limits) as watcher:
            try:
                yield watcher
            except PlaitError as error:
                watcher.look_back()
                if watcher.hang is None or not isinstance(error, RankFailed):
                    raise
                raise RankFailed(watcher.hang.text()) from error

    @contextlib.contextmanager
    def inside(self, folder: RunFolder | None) -> Iterator[None]:
        """Watch over the others from within a rank, where no other process does."""
        if folder is None or not self.by_ranks:
            yield
            return
        with Watcher(folder.doctor, self.limits):
            yield
