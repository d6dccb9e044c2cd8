"""Limits of the system that an error has met: what they are, and how to stay within them."""

from __future__ import annotations

import errno
import os
from typing import Final

from plait.errors import ConfigError, PlaitError
from plait.launcher.limits import too_many_files

_NAME_BYTES: Final = 255
"""The length of a name that the usual file systems take."""


def explained(error: Exception) -> Exception:
    """The error that a user can act on, or the given one where no limit of the system is met."""
    if not isinstance(error, OSError) or isinstance(error, PlaitError):
        return error
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return too_many_files()
    if error.errno == errno.ENAMETOOLONG:
        return ConfigError(_too_long(os.fsdecode(error.filename or "")))
    if isinstance(error, PermissionError) and error.filename is not None:
        return ConfigError(
            f"{os.fsdecode(error.filename)} cannot be reached: permission denied; ask its owner "
            "for access to it and to the folders above it, or name another place"
        )
    return error


def _too_long(path: str) -> str:
    names = [name for name in path.split("/") if len(os.fsencode(name)) > _NAME_BYTES]
    if not names:
        return f"a path of {len(os.fsencode(path))} bytes is too long; name a shorter one: {path}"
    return (
        f"a name of {len(os.fsencode(names[0]))} bytes is too long, as file systems take "
        f"{_NAME_BYTES}; name a shorter one: {names[0]}"
    )
