"""Whether a process still runs."""

from __future__ import annotations

import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """A process that has ended and is not reaped yet does not run."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
