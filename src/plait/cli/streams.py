"""stdout and stderr of a command, where their reader may leave and their disk may be full.

A reader that has left, such as `head`, is no failure. What is still written goes nowhere, and the
verb keeps its exit code. Any other refusal of stdout is an error.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from plait.errors import PlaitError


class StdoutError(PlaitError):
    """An answer that could not be written: a full disk behind stdout."""

    exit_code = 1


class DrawnText(io.StringIO):
    """A view as stdout will show it. rich would end the process where the reader has left."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of stdout: it decides which lines a table may have."""
        return sys.stdout.encoding

    def isatty(self) -> bool:
        """Whether stdout is a terminal: it decides about colours."""
        return sys.stdout.isatty()


def open_closed() -> None:
    """Let the streams that this process started without lead nowhere."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            _lead_nowhere(number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))


def escape_unknown() -> None:
    """Let stdout show letters that its encoding lacks as escapes, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str, stream: TextIO) -> None:
    """Write text on the stream of the answer, now. Raises `StdoutError` where that cannot be."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        _drop(stream)
        if not isinstance(error, BrokenPipeError):
            raise StdoutError(
                f"the answer cannot be written to stdout: {error.strerror or error}; "
                "free space there, or send stdout elsewhere"
            ) from None


def complain(line: str) -> None:
    """Write a line on stderr; without a reader it is lost."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def settle(stream: TextIO) -> None:
    """Write what the stream still holds, or drop it."""
    try:
        if not stream.closed:
            stream.flush()
    except OSError:
        _drop(stream)


def _drop(stream: TextIO) -> None:
    """Let a stream lead nowhere, with what it still holds."""
    _lead_nowhere(stream.fileno())
    stream.flush()


def _lead_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    if nowhere == number:
        os.set_inheritable(number, True)
    else:
        os.close(nowhere)
