"""The heads of snapshot files in memory: whether a file is whole, and of which step.

    step | place of the list | its bytes | values ... | list (JSON)

A file is being written while its step is `NOTHING`. Knows no torch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from plait.launcher.board import NOTHING

HEAD = struct.Struct("<qqq")


def step_of(path: Path) -> int:
    """The step whose state a file holds; `NOTHING` for a file that is not whole."""
    with path.open("rb") as file:
        head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return NOTHING
    step, place, _ = HEAD.unpack(head)
    return int(step) if place else NOTHING


def newest_whole(parts: Sequence[Sequence[Path]]) -> tuple[Path, ...]:
    """By rank, the files of the newest step that every rank has whole; empty for none."""
    by_rank = [{step_of(path): path for path in files} for files in parts]
    steps = set.intersection(*(set(files) for files in by_rank)) - {NOTHING}
    if not steps:
        return ()
    newest = max(steps)
    return tuple(files[newest] for files in by_rank)
