"""Weights & Biases: a run of its own, offline where no key is known."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from plait.run.trackers.tracker import PROJECT, TrackedRun


class WandB:
    """Metrics by step, the config, and the report as an artefact. `WANDB_*` variables hold."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if mode is None and not wandb.api.api_key:
            mode = "offline"  # online it would ask for a key on the terminal
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            id=run.id,
            resume="allow" if run.first_step > 1 else None,
            dir=str(run.folder),
            config=run.settings(),
            mode=mode,
            settings=wandb.Settings(silent=True),
        )

        self._last = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step >= self._last:
            self._run.log(dict(metrics), step=step)
            self._last = step

    def go_back(self, step: int) -> None:
        """The series keeps what it was told first, since the package drops earlier steps."""

    def finish(self, report: Path | None) -> None:
        if report is not None:
            import wandb

            artefact = wandb.Artifact("report", type="report")
            artefact.add_file(str(report))
            self._run.log_artifact(artefact)
        self._run.finish()
