"""Messages that are printed once, however many processes a world has."""

from __future__ import annotations

import sys

from plait.launcher.door import joined_world


def speaks() -> bool:
    """Whether this process prints for all: the only one, or rank 0 of a world that torchrun
    started.
    """
    world = joined_world()
    return world is None or world.rank == 0


def say(message: str) -> None:
    """Print a line on stderr, once."""
    if speaks():
        print(message, file=sys.stderr, flush=True)
