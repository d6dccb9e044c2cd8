"""Messages that are printed once, however many processes a world has."""

from __future__ import annotations

import sys

from plait.launcher.api import joined_world


def is_main_process() -> bool:
    """Whether this process prints for all: the only one, or rank 0 of a world that torchrun
    started.
    """
    world = joined_world()
    return world is None or world.rank == 0


def say(message: str) -> None:
    """Print a line on stderr, once."""
    if is_main_process():
        print(message, file=sys.stderr, flush=True)
