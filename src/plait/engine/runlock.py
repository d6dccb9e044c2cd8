"""One run at a time in a folder: a lock that dies with the process that holds it.

The lock is the kernel's (flock) on a file in the folder. So a killed run leaves no lock behind,
whatever is left of its files. A file system without such locks is used without.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from plait.errors import ConfigError

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[float | None]:
    """Hold a run's folder: since when (seconds of the file system), None where there are no locks.

    Errors: `ConfigError` when another process holds it, by its number.
    """
    lock = _locked(folder)
    try:
        yield None if lock is None else os.fstat(lock.fileno()).st_mtime
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()
            lock.close()


def _locked(folder: Path) -> IO[str] | None:
    """The locked file; None where there are no locks."""
    path = folder / LOCK
    while fcntl is not None:
        lock = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise ConfigError(
                f"{folder} is in use by another run (process {holder}); "
                "wait for its end, or choose another --out"
            ) from None
        except OSError:
            lock.close()
            return None
        if _is_still(path, lock):
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            return lock
        lock.close()  # its holder has just ended and taken the file away
    return None


def _is_still(path: Path, lock: IO[str]) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(lock.fileno()))
    except OSError:
        return False
