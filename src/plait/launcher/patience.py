"""A line on stderr about what a verb does, where that takes a while.

On a busy machine torch alone may take a minute to load.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

QUIET_SECONDS = 2.0
AGAIN_SECONDS = 10.0


@contextlib.contextmanager
def telling(
    verb: str, doing: str, quiet_seconds: float | None = None
) -> Iterator[Callable[[str], None]]:
    """Say what is being done after `quiet_seconds`, 2 by default, and again now and then. What is
    yielded takes the next thing that is done.
    """
    now = [doing]
    is_over = threading.Event()
    begun = time.monotonic()

    def speak() -> None:
        wait = QUIET_SECONDS if quiet_seconds is None else quiet_seconds
        while not is_over.wait(wait):
            wait = AGAIN_SECONDS
            seconds = time.monotonic() - begun
            print(f"plait {verb}: {now[-1]} ({seconds:.0f} s so far)", file=sys.stderr, flush=True)

    speaker = threading.Thread(target=speak, name="patience", daemon=True)
    speaker.start()
    try:
        yield now.append
    finally:
        is_over.set()
        speaker.join()
