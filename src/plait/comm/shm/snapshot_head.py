"""The heads of snapshot files in memory: whether a file is whole, and of which step.

    step | place of the list of shards | its bytes | bytes of the meta data that follows it

A file is being written while its step is `NOTHING`. Knows no torch.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

NOTHING = -1
_STEP = struct.Struct("<q")
_REST = struct.Struct("<qqq")


@dataclass(frozen=True)
class Head:
    """The first bytes of a snapshot file: its step, and where its list of tensors lies."""

    step: int
    list_place: int = 0
    list_bytes: int = 0
    meta_bytes: int = 0
    size: ClassVar[int] = _STEP.size + _REST.size

    def write(self, memory: mmap.mmap) -> None:
        """Write it; the step comes last, so that a head which names one is true."""
        if self.step != NOTHING:
            _REST.pack_into(memory, _STEP.size, self.list_place, self.list_bytes, self.meta_bytes)
        _STEP.pack_into(memory, 0, self.step)

    @staticmethod
    def read(memory: mmap.mmap | bytes) -> Head:
        """The head of a file that begins so."""
        if len(memory) < Head.size:
            return Head(NOTHING)
        (step,) = _STEP.unpack_from(memory, 0)
        head = Head(step, *_REST.unpack_from(memory, _STEP.size))
        return head if head.list_place else Head(NOTHING)


def newest_whole(files: Sequence[Sequence[Path]]) -> tuple[Path, ...]:
    """By rank, the files of the newest step that every rank has whole; empty for none."""
    by_rank = [{step_of(path): path for path in own} for own in files]
    steps = set.intersection(*(set(own) for own in by_rank)) - {NOTHING}
    if not steps:
        return ()
    newest = max(steps)
    return tuple(own[newest] for own in by_rank)


def step_of(path: Path) -> int:
    """The step of a file in memory; `NOTHING` where it is not whole."""
    with path.open("rb") as file:
        return Head.read(file.read(Head.size)).step
