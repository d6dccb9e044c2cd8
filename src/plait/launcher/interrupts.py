"""Ctrl-C, which the terminal sends as SIGINT to every process of its group.

The fork server is one of them, also while it still loads torch. Only the launcher answers. So the
server starts with the signal held back, and ignores it once this module is imported, its first. The
processes that the server forks take the signal as any Python process does.
"""

from __future__ import annotations

import multiprocessing.util
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT back inside the block. A process that is started there inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_if_held() -> None:
    """Ignore SIGINT where it is held back, as in a fork server. Nothing changes elsewhere."""
    if not hasattr(signal, "pthread_sigmask"):  # a system that cannot fork
        return
    if signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    multiprocessing.util.register_after_fork(signal, _take_again)


def _take_again(_: object) -> None:
    """Raise `KeyboardInterrupt` by SIGINT again, in a process that the server has forked."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


_ignore_if_held()
