"""How a process tells its peers that it answers no more, though it still lives.

A rank whose function has returned stays until its launcher has all results. A peer that waits for
it learns that it has left.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

_departures: weakref.WeakKeyDictionary[object, Callable[[], object]] = weakref.WeakKeyDictionary()


def at_departure(fabric: object, mark: Callable[[], None]) -> None:
    """Have `mark` called when the fabric is freed, or when the process leaves."""
    process = os.getpid()

    def leave() -> None:
        if os.getpid() == process:  # a child that was forked shares the memory, and is no rank
            mark()

    _departures[fabric] = weakref.finalize(fabric, leave)


def depart() -> None:
    """Mark all fabrics of this process as left."""
    for departure in list(_departures.values()):
        departure()
