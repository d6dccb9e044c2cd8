"""Is a process still there? Read from /proc: no signal is sent, and a dead process that nobody has
reaped counts as gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`, and theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = []
    wave = [pid]
    while wave:
        wave = [child for child, parent in parents.items() if parent in wave]
        found += wave
    return found


def wait_until_gone(pids: Iterable[int], seconds: float = 10.0) -> None:
    """Fail when one is still running after `seconds`: a limit, not a measurement; ranks are gone
    long before.
    """
    end = time.monotonic() + seconds
    alive = [pid for pid in pids if is_running(pid)]
    while alive and time.monotonic() < end:
        time.sleep(0.05)
        alive = [pid for pid in alive if is_running(pid)]
    assert not alive, f"still running: {alive}"
