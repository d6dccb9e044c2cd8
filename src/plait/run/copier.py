"""A thread that copies a run's state beside its steps, one copy after the other.

The copy itself is one call that leaves the interpreter to the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Copier:
    """Makes copies in a thread of its own. The thread begins with the first of them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "plait-copy")
        self._pending: Future[float] | None = None

    def begin(self, copy: Callable[[], None]) -> None:
        """Make a copy from here on."""
        self.wait()
        self._pending = self._thread.submit(_timed, copy)

    def wait(self) -> float:
        """Return when the copy is made: its processor seconds, 0 without one. Raises its error."""
        pending = self._pending
        self._pending = None
        return 0.0 if pending is None else pending.result()

    def close(self) -> None:
        """End the thread, once its copy is made."""
        self._thread.shutdown()


def _timed(copy: Callable[[], None]) -> float:
    began = time.thread_time()
    copy()
    return time.thread_time() - began
