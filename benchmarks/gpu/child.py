"""The inside of a process of the GPU tables: get ready, wait for the turn, measure."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.record import Record, say

FEW_CORES = 4
"""Threads of the host for a process: several of them compile at once."""


@dataclass(frozen=True)
class Turn:
    """What a part needs: its device, where its numbers go, and until when it may measure."""

    device: str
    record: Record
    until: float = 0.0
    ready: Any = None
    """What `prepare` of the part gave."""

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.until - time.time()


def main() -> None:
    """Prepare the part of the command line, wait for a line on stdin, and measure."""
    name, device, out = sys.argv[1:4]
    folder = Path(out)
    torch.set_num_threads(FEW_CORES if device == "cuda" else 1)
    record = Record(folder, name)
    part, _, number = name.partition("-")
    module = f"benchmarks.gpu.{part}"
    if importlib.util.find_spec(module) is None:
        (folder / f".ready-{name}").touch()
        sys.stdin.readline()
        say(f"\n{name}: there is no {module} here")
        return
    error: Exception | None = None
    ready = None
    try:
        found = importlib.import_module(module)
        if hasattr(found, "prepare"):
            ready = found.prepare(device, number)
    except Exception as caught:  # told when the turn has come
        traceback.print_exc()
        error = caught
    sys.stderr.flush()
    (folder / f".ready-{name}").touch()
    until = float(sys.stdin.readline() or 0.0)
    if not until:
        return
    if error is not None:
        record.failed("getting ready", error)
    turn = Turn(device, record, until, ready)
    try:
        if part == "equality":
            found.main(folder)
        else:
            found.measure(turn, number)
    except Exception as caught:  # one part must not end the others
        record.failed("measuring", caught)
