"""POSIX semaphores in shared memory, by ctypes: the one primitive of the C library that Python does
not offer unnamed.

They block in the kernel instead of spinning, so ranks may outnumber cores, and each is a full
memory barrier.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time

SEMAPHORE_BYTES = 64  # sem_t is 32 bytes on 64-bit Linux; a cache line each


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def available() -> bool:
    """Whether this system has process-shared semaphores and anonymous files that work as needed:
    64-bit Linux.
    """
    return (
        sys.platform == "linux"
        and ctypes.sizeof(ctypes.c_void_p) == 8
        and hasattr(os, "memfd_create")
    )


class Semaphores:
    """An array of semaphores at an address; one process calls `create` before any other uses
    them.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        library = ctypes.CDLL(None, use_errno=True)
        self._init = library.sem_init
        self._post = library.sem_post
        self._try = library.sem_trywait
        self._timed = library.sem_timedwait
        self._init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self._timed.argtypes = [ctypes.c_void_p, ctypes.POINTER(_TimeSpec)]
        for function in (self._post, self._try):
            function.argtypes = [ctypes.c_void_p]

    def create(self, num: int) -> None:
        """Initialise `num` semaphores to zero, shared between processes.

        Raises:
            OSError: the system has none.
        """
        for index in range(num):
            if self._init(self._address + index * SEMAPHORE_BYTES, 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init")

    def post(self, *indices: int) -> None:
        """Add one to each."""
        post = self._post
        address = self._address
        for index in indices:
            post(address + index * SEMAPHORE_BYTES)

    def try_take(self, index: int) -> bool:
        """Remove one if there is one."""
        found: int = self._try(self._address + index * SEMAPHORE_BYTES)
        return found == 0

    def take(self, index: int, timeout_seconds: float) -> bool:
        """Wait for one and remove it; False after the time limit or an interruption.

        Raises:
            OSError: the wait failed otherwise.
        """
        until = time.time() + timeout_seconds
        spec = _TimeSpec(int(until), int(until % 1 * 1e9))
        if self._timed(self._address + index * SEMAPHORE_BYTES, ctypes.byref(spec)) == 0:
            return True
        code = ctypes.get_errno()
        if code not in {errno.ETIMEDOUT, errno.EINTR}:
            raise OSError(code, f"sem_timedwait: {os.strerror(code)}")
        return False
