"""TensorBoard: event files in `RUN/tensorboard`, which `tensorboard --logdir` shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from plait.run.trackers.tracker import TrackedRun


class TensorBoard:
    """Scalars by step, the config and the plan as text."""

    def __init__(self, run: TrackedRun) -> None:
        self._folder = str(run.folder / "tensorboard")
        self._open(run.first_step)
        config = json.dumps(run.config, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{config}\n```", run.first_step - 1)
        self._writer.add_text("plan", f"`{run.plan}`", run.first_step - 1)

    def _open(self, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps from `purge_step` on are hidden: a continued run writes them again.
        self._writer = SummaryWriter(self._folder, purge_step=first_step)

    def go_back(self, step: int) -> None:
        """The series has what is told again in place of what it was told first."""
        self._writer.close()
        self._open(step + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, report: Path | None) -> None:
        if report is not None:
            self._writer.add_text("report", str(report))
        self._writer.close()
