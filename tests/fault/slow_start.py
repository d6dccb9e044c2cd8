"""Data of a run that is slow until a file says otherwise: a test comes in time to disturb it.

The variable HURRY names the file. Samples are the same before and after.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from tests.fault.self_made import Tokens

SLOW_SECONDS = 0.1  # a sample: 50 steps of 4 samples on each rank would take 20 s


class SlowAtFirst(Tokens):
    """Random tokens, each sample by its own seed."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not Path(os.environ["HURRY"]).exists():
            time.sleep(SLOW_SECONDS)
        return super().__getitem__(index)


def data() -> Dataset[tuple[Tensor, Tensor]]:
    """The data set."""
    return SlowAtFirst()
