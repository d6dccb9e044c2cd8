"""A process as the system sees it: whether it is there, what it does, what it has used."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

TICKS_A_SECOND = 100


@dataclass(frozen=True)
class Usage:
    """The use of the system by a process and its children.

    The delay is the time in which threads were ready and had no processor.
    """

    cpu_seconds: float
    io_bytes: int
    major_faults: int
    delay_seconds: float


def start_ticks(pid: int) -> int:
    """When a process began, by the clock of the system; 0 where it is unknown."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def state(pid: int, start: int = 0) -> str:
    """The state letter of a process; empty when it is gone, or is another one since."""
    fields = _stat(pid)
    if not fields or fields[0] in ("Z", "X") or (start and int(fields[19]) != start):
        return ""
    return fields[0]


def usage(pid: int) -> Usage:
    """The usage of a process until now, its children included."""
    cpu = 0.0
    faults = 0
    for each in (pid, *children(pid)):
        fields = _stat(each)
        if fields:
            cpu += (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND
            faults += int(fields[9])
    return Usage(cpu, _io_bytes(pid), faults, delay_seconds(pid))


def delay_seconds(pid: int) -> float:
    """How long the threads of a process were ready to run and had no processor, in all."""
    fields = [text.split() for text in _of_threads(pid, "schedstat")]
    return sum(int(each[1]) for each in fields if len(each) > 1) / 1e9


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    descendants: list[int] = []
    wave = [pid]
    while wave:
        following: list[int] = []
        for parent in wave:
            for text in _of_threads(parent, "children"):
                following += [int(word) for word in text.split()]
        descendants += following
        wave = following
    return descendants


def _of_threads(pid: int, name: str) -> list[str]:
    """The files of a name of all threads of a process; those that end meanwhile are left out."""
    folder = Path(f"/proc/{pid}/task")
    try:
        threads = list(folder.iterdir())
    except OSError:
        return []
    texts = []
    for thread in threads:
        with contextlib.suppress(OSError):
            texts.append((thread / name).read_text())
    return texts


def _io_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines[:2])


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
