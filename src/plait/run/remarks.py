"""Settings that do not do what they seem to, said once before the first step of a run."""

from __future__ import annotations

from collections.abc import Callable

from plait.run.hooks import Hook, RunStart


class Remarks(Hook):
    """A sentence for each setting that does nothing on this device, or less with these data."""

    def __init__(self, global_batch: int, say: Callable[[str], None]) -> None:
        self._global_batch = global_batch
        self._say = say

    def needs_state(self, step: int) -> bool:
        return False

    def on_start(self, start: RunStart) -> None:
        """Say them, of a run that has steps to do."""
        if start.first_step > start.last_step:
            return
        engine = start.engine
        if engine.plan.dp.offload and engine.world.device.type == "cpu":
            self._say(
                "offload saves nothing here: on the CPU optimizer state is in host memory already"
            )
        there = start.loader.samples_per_epoch
        if self._global_batch > there:
            self._say(
                f"warning: train.global_batch {self._global_batch} is more than the {there} "
                f"samples of the data set, so each step trains on {there}; set "
                f"train.global_batch to {there} or less, or add data"
            )
