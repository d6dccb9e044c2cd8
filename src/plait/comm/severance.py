"""An end to every wait of a world, from another thread.

A rank that waits for a peer sits in native code, which no exception of Python reaches. Its
connections can be shut down instead: the wait then ends with an error, at once, on both sides. So a
rank that learns of a loss gets free, also while it still connects.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DESCRIPTORS = Path("/dev/fd" if sys.platform == "darwin" else "/proc/self/fd")


class Severance:
    """The connections that a world has made, and whether they are cut."""

    def __init__(self) -> None:
        self.is_cut = False
        self._changed = threading.Condition()
        self._known: set[int] | None = None  # before the connecting that is under way
        self._own: set[int] = set()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take the sockets that are opened inside for the world's own."""
        with self._changed:
            self._known = _sockets()
        try:
            yield
        finally:
            with self._changed:
                self._own |= _sockets() - self._known
                self._known = None
                if self.is_cut:
                    _shut_down(self._own)

    def cut(self) -> None:
        """End every wait, those under way and those to come."""
        with self._changed:
            self.is_cut = True
            connecting = set() if self._known is None else _sockets() - self._known
            _shut_down(self._own | connecting)
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Whether it is cut, or will be within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_cut, seconds)

    def forget(self) -> None:
        """Leave the connections alone: their world closes them."""
        with self._changed:
            self._own.clear()


def _sockets() -> set[int]:
    """The descriptors of this process that are connections of the internet's protocols.

    Those that listen are left alone: a library that fails to accept may end the process.
    """
    descriptors = set()
    with suppress(OSError):
        for path in DESCRIPTORS.iterdir():
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                    descriptors.add(int(path.name))
    return {descriptor for descriptor in descriptors if _is_connection(descriptor)}


def _is_connection(descriptor: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return one.family in (socket.AF_INET, socket.AF_INET6) and not listens
    return False


def _shut_down(descriptors: set[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            one.shutdown(socket.SHUT_RDWR)
