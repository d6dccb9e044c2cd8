"""Ctrl-C in the fork server, from its first moment.

The terminal sends SIGINT to every process of its group, also to a server that still loads torch.
The launcher speaks for all of them. So the server starts with the signal held, and ignores it from
this import on, its first. The processes that it forks hear it again.
"""

from __future__ import annotations

import multiprocessing.util
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT until the end of the block. A process that starts in it begins so, and stays."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_if_held() -> None:
    if signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return  # no process that has started so
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    multiprocessing.util.register_after_fork(signal, _hear)


def _hear(_: object) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_ignore_if_held()
