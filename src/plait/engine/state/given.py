"""Lists, dictionaries and objects that a block gets, under recomputation.

A block may write into them, as into a cache of keys, or a dictionary that all blocks return. The
forward that backward repeats finds them as the first run did, and leaves them as they are.
"""

from __future__ import annotations

from typing import Any

from plait.engine.state.buffers import Context
from plait.held import TableEntries, tables_of


class AsGiven:
    """Around the forward of a block run again: what its arguments hold is that of the first run."""

    def __init__(self, given: tuple[object, ...], inner: Context) -> None:
        """Made before the first run of the forward, with its arguments."""
        self._given = TableEntries(tables_of(given))
        self._inner = inner
        self._now: TableEntries | None = None

    def __enter__(self) -> None:
        self._now = self._given.now()
        self._given.put_back()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            if self._now is not None:
                self._now.put_back()
            self._now = None
