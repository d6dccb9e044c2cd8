"""The memory of a rank as its device, or the kernel, counts it."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_PAGES: Final = Path("/proc/self/statm")
_MACHINE: Final = Path("/proc/meminfo")


def peak_memory_bytes() -> int:
    """The most memory of this rank so far: reserved of its GPU, else resident in the process."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    import resource  # Unix alone has it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def held_memory_bytes(device: torch.device) -> int | None:
    """The memory that this rank holds now: of its GPU, or of the process (resident) on the CPU.

    None where the system does not say.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        resident = _PAGES.read_text().split()[1]
    except OSError:
        return None
    return int(resident) * mmap.PAGESIZE


def free_memory_bytes() -> int | None:
    """The host memory of this machine that is there to be taken; None where the system does not
    say.
    """
    try:
        lines = _MACHINE.read_text().splitlines()
    except OSError:
        return None
    free = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if free is None else int(free.split()[1]) << 10
