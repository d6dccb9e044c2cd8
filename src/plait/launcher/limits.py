"""Limits of the system that keep ranks from starting, said before any of them starts."""

from __future__ import annotations

import errno
import functools
import multiprocessing.util
import os
import sys
import tempfile
from typing import Final

from plait.errors import ConfigError, RunError

try:
    import resource  # now, as no module can be loaded where no more files can be opened
except ImportError:  # Unix alone has it
    resource = None  # type: ignore[assignment]

_SPARE_FILES: Final = 24
"""Files that a launcher and a rank of a small run open beside those that are open already."""
_ADDRESS_BYTES: Final = 107 if sys.platform.startswith("linux") else 103
"""The longest path of a socket."""
_LISTENER: Final = "/listener-12345678"
"""The length of the name that multiprocessing gives the socket of its server."""


@functools.cache
def check_limits() -> None:
    """Look once whether this process may open a server's socket, and files enough.

    Raises:
        ConfigError: the path of temporary files is too long.
        RunError: the limit of open files is too low.
    """
    folder = multiprocessing.util.get_temp_dir()
    length = len(os.fsencode(folder + _LISTENER))
    if length > _ADDRESS_BYTES:
        raise ConfigError(
            f"ranks cannot be started from {tempfile.gettempdir()}, as the path of a socket in it "
            f"has {length} bytes and the system takes {_ADDRESS_BYTES}; set TMPDIR to a shorter "
            "path, such as TMPDIR=/tmp"
        )
    opened: list[int] = []
    try:
        for _ in range(_SPARE_FILES):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise too_many_files() from error
        raise
    finally:
        for number in opened:
            os.close(number)


def too_many_files() -> RunError:
    """The error of a process that may open no more files: its limit, and how to raise it."""
    limit = ""
    if resource is not None:
        limit = f" of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
    return RunError(
        f"no more files can be opened, as the limit{limit} for this process (ulimit -n) or that "
        "of the machine is reached; raise it, as by ulimit -n 4096, or start fewer ranks"
    )
