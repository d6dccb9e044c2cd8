"""Signals of the launcher's process, heard by a run while it goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plait.launcher.seat import SIGNALS


@contextmanager
def heard(hear: Callable[[int, object], None]) -> Iterator[None]:
    """Have signals of this process call `hear`, where this is the thread that gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (*SIGNALS, signal.SIGHUP)
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
