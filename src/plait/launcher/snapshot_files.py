"""The files in memory that hold a run's snapshots, as the launcher keeps them."""

from __future__ import annotations

from pathlib import Path

from plait.comm.shm.snapshot_head import newest_whole
from plait.launcher.board import Files

FILES_A_RANK = 2


class SnapshotFiles:
    """The files of one plan after the other.

    Attributes:
        parts: by rank of the present plan, its files.
        newest: by rank of the plan that wrote it, the files of the newest whole snapshot.
    """

    def __init__(self, files: Files, num_ranks: int) -> None:
        self._files = files
        self.parts = self._make(num_ranks)
        self.newest: tuple[Path, ...] = ()

    def find(self) -> None:
        """Look for the newest whole snapshot, and let go of the one before it."""
        newest = newest_whole(self.parts)
        if not newest:
            return
        for path in self.newest:
            if path not in newest and path not in self._all():
                self._files.drop(path)
        self.newest = newest

    def change(self, num_ranks: int) -> None:
        """Make the files of another plan; the newest snapshot stays."""
        for path in self._all() - set(self.newest):
            self._files.drop(path)
        self.parts = self._make(num_ranks)

    def _all(self) -> set[Path]:
        return {path for own in self.parts for path in own}

    def _make(self, num_ranks: int) -> tuple[tuple[Path, ...], ...]:
        own = (tuple(self._files.make() for _ in range(FILES_A_RANK)) for _ in range(num_ranks))
        return tuple(own)
