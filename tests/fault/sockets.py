"""The listening TCP sockets of a process and all that it started, read from /proc while it runs."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from tests.fault.processes import children

LISTENING = "0A"
LOOPBACK_BYTES = re.compile(r"(0100007F|0{24}01000000|0{16}FFFF00000100007F)")
LIMIT_SECONDS = 90


def listening() -> dict[str, str]:
    """The local address, in the kernel's hexadecimal, of every listening socket, by inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        rows = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        for words in map(str.split, rows):
            if words[3] == LISTENING:
                found[words[9]] = words[1]
    return found


def inodes(pid: int) -> set[str]:
    """The sockets that a process holds."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def watch(
    process: subprocess.Popen[str], *, is_own: bool = True, limit_seconds: float = LIMIT_SECONDS
) -> set[str]:
    """The addresses that the process (where it `is_own`) and its children listened on until it
    ended.

    A child holds the sockets of its parent for a moment, until it begins its own program. Those of
    a process that is not our own stay its own.
    """
    seen: set[str] = set()
    foreign: set[str] = set()
    first = [process.pid] if is_own else []
    end = time.monotonic() + limit_seconds
    while process.poll() is None and time.monotonic() < end:
        known = listening()
        if not is_own:
            foreign |= inodes(process.pid)
        for pid in [*first, *children(process.pid)]:
            seen |= {known[inode] for inode in (inodes(pid) - foreign) & known.keys()}
        time.sleep(0.03)
    if process.poll() is None:
        process.kill()
    process.wait()
    return seen


def beyond_loopback(addresses: set[str]) -> set[str]:
    """Those that other machines can reach."""
    return {one for one in addresses if not LOOPBACK_BYTES.fullmatch(one.partition(":")[0])}
