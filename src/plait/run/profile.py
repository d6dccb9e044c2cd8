"""`--profile STEP`: one step under torch's profiler, on every rank, into the run's folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from plait.run.hooks import Hook, RunStart, StepDone


class ProfileStep(Hook):
    """Records a step into `path`, a trace for Perfetto. The batch before it is loaded inside."""

    def __init__(self, step: int, path: Path) -> None:
        self._step = step
        self._path = path
        self._profile: profile | None = None

    def on_start(self, start: RunStart) -> None:
        """Begin, where it is the first step."""
        self._begin(start.first_step)

    def needs_state(self, step: int) -> bool:
        return self._step in {step, step + 1}

    def on_step(self, done: StepDone) -> None:
        """Begin before the step, and write after it."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
        self._begin(done.step + 1)

    def _begin(self, following: int) -> None:
        if following != self._step:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.__enter__()
