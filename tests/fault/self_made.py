"""Data of a run in which a rank fails by its own code, once or always: the user's part of a fault.

The variable SELF_MADE holds it as JSON: `kind`, `rank`, `sample` (the number of its samples that
it reads before), and `mark`, a file whose presence says that the fault has happened. Without a mark
it happens in each life of the rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

SEQ_LEN = 8
VOCAB_SIZE = 64
NUM_SAMPLES = 4096
PAUSE_SECONDS = 0.002
OUT_OF_MEMORY = 137

state = {"read": 0}


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens, each sample by its own seed; reading takes a moment."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(PAUSE_SECONDS)
        state["read"] += 1
        fail(json.loads(os.environ.get("SELF_MADE", "{}")))
        seeded = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCAB_SIZE, (SEQ_LEN + 1,), generator=seeded)
        return tokens[:-1], tokens[1:]


def data() -> Dataset[tuple[Tensor, Tensor]]:
    """The data set."""
    return Tokens()


def fail(fault: dict[str, Any]) -> None:
    """Commit the fault where it is this rank's, and due."""
    if os.environ.get("RANK") != str(fault.get("rank")) or state["read"] <= fault["sample"]:
        return
    mark = fault.get("mark")
    if mark and Path(mark).exists():
        return
    if mark:
        Path(mark).touch()
    if fault["kind"] == "raises":
        raise ValueError("a sample that cannot be read")
    if fault["kind"] == "no memory":
        raise MemoryError
    if fault["kind"] == "exits":
        sys.exit(0)
    if fault["kind"] == "is killed for memory":
        os._exit(OUT_OF_MEMORY)
    os._exit(0)
