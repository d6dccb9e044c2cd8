"""The log of a rank: what its Python code writes to stdout and stderr, in `RUN/logs/rank-N.txt`.

The terminal gets it too, at once. Each line is in the file when its write returns, so that a rank
that is killed loses none. What native code writes past Python goes to the terminal alone. So does
what a full disk has no room for. A log neither ends a run nor hides why it ended.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from plait.errors import RunError

AGAIN: Final = "=== this rank starts again ==="
ENDED: Final = "=== this rank ended with an error ==="


class Tee(io.TextIOBase):
    """A stream that writes to another stream and to a log. `terminal` is the other stream."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self.terminal = terminal
        self._log = log

    def write(self, text: str) -> int:
        """Write text to the stream and to the file; the number of characters."""
        if not self._log.closed:
            with contextlib.suppress(OSError):
                self._log.write(text)
        return self.terminal.write(text)

    def flush(self) -> None:
        """Flush both."""
        if not self._log.closed:
            with contextlib.suppress(OSError):
                self._log.flush()
        self.terminal.flush()

    def isatty(self) -> bool:
        """Whether the other stream is a terminal."""
        return self.terminal.isatty()

    def fileno(self) -> int:
        """The descriptor of the other stream."""
        return self.terminal.fileno()

    def writable(self) -> bool:
        """Always."""
        return True


@contextlib.contextmanager
def logged(path: Path) -> Iterator[None]:
    """Keep a log of what is written inside; an error that leaves it is written there too.

    A line says where a rank that has a log already starts again.

    Errors: `RunError` where there can be no log.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("a", buffering=1, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    if log.tell():
        with contextlib.suppress(OSError):
            log.write(f"\n{AGAIN}\n")
    try:
        with (
            contextlib.redirect_stdout(Tee(sys.stdout, log)),
            contextlib.redirect_stderr(Tee(sys.stderr, log)),
        ):
            yield
    except BaseException:
        with contextlib.suppress(OSError):
            log.write(f"\n{ENDED}\n{traceback.format_exc()}")
        raise
    finally:
        with contextlib.suppress(OSError):
            log.close()


def terminal_of(stream: TextIO) -> TextIO:
    """The terminal behind a stream; a bar that is drawn again and again belongs into no log."""
    is_drawn = isinstance(stream, Tee) and stream.isatty()
    return stream.terminal if is_drawn and isinstance(stream, Tee) else stream
