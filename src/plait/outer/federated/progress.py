"""Lines on how far a long round is."""

from __future__ import annotations

import time

from plait.config import Config
from plait.launcher.main_process import say

EVERY_SECONDS = 10.0


class Progress:
    """Counts the steps of all clients in a round, and says now and then how many are left."""

    def __init__(self, number: int, num_steps: int) -> None:
        self._number = number
        self._num_steps = num_steps
        self._done = 0
        self._began = time.monotonic()
        self._said = self._began

    def advance(self, num_steps: int = 1) -> None:
        """Count steps that are done."""
        self._done += num_steps
        now = time.monotonic()
        if now - self._said < EVERY_SECONDS or self._done >= self._num_steps:
            return
        self._said = now
        left = (now - self._began) / self._done * (self._num_steps - self._done)
        say(
            f"plait: round {self._number}: step {self._done} of {self._num_steps} of all clients, "
            f"about {left:.0f} s left"
        )


def workload(config: Config, num_asked: int, num_steps: int, num_samples: int) -> str:
    """How much one round is, for people."""
    section = config.federated
    return (
        f"plait: about {num_steps} steps a round: {num_asked} of {section.clients} clients, "
        f"batches of {config.train.global_batch}, federated.local_epochs {section.local_epochs}; "
        f"all clients together train on {num_samples} samples"
    )
