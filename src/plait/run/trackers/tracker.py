"""The facts that a tracker gets, and the calls that each package must answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plait.values import JsonMapping, JsonObject

PROJECT = "plait"
"""The project or experiment of all runs, where the package's own variables name none."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows.

    Attributes:
        folder: the run's folder; its name is the run's name.
        config: the sections of the config.
        first_step: the first step of this process; above 1 the run is continued.
    """

    folder: Path
    config: JsonMapping
    plan: str
    first_step: int

    @property
    def id(self) -> str:
        """A name that stays when the run is continued: by the folder's place."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]

    def settings(self) -> JsonObject:
        """The config by dotted key, and the plan."""
        flat: JsonObject = {"plan": self.plan}
        for section, table in self.config.items():
            flat.update({f"{section}.{key}": value for key, value in table.items()})
        return flat


class Tracker(Protocol):
    """One package. Any exception of it is printed once, and the run goes on without it."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the numbers of a step; names as `train/loss`."""

    def go_back(self, step: int) -> None:
        """Training goes on after this earlier step: those since are told a second time."""

    def finish(self, report: Path | None) -> None:
        """The run has ended; `report` is its page."""
