"""The line of Python that a rank is at, asked for from outside.

A signal makes the rank write the stack of its main thread. That is done in C, so that a held
interpreter is no hindrance. A stopped process does so as soon as it is continued, before anything
else. Only that thread gets the signal, since stacks of threads that run cannot be read safely.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import linecache
import os
import re
import signal
import sysconfig
import time
from pathlib import Path
from typing import IO, Final

from plait.doctor.flight import stack_path
from plait.doctor.record import RankSnapshot


def _spare_signal() -> int:
    """A signal that nothing else uses: one for real time, which macOS lacks; 0 on Windows."""
    first = getattr(signal, "SIGRTMIN", None)
    return getattr(signal, "SIGUSR2", 0) if first is None else first + 7


SIGNAL: Final = _spare_signal()
ANSWER_SECONDS: Final = 1.0
_HEADING: Final = "Stack (most recent call first)"
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)).as_posix() for name in ("stdlib", "purelib", "platlib")
)
_OWN = Path(__file__).parents[1].as_posix()

_open: list[IO[str]] = []  # the handler writes to the descriptor for as long as the process lives


def answer_signals(folder: Path, rank: int) -> None:
    """Have a thread of this process write its stack into the folder whenever it gets the signal."""
    for before in _open:
        before.close()
    _open[:] = [stack_path(folder, rank).open("w")]
    faulthandler.register(SIGNAL, file=_open[0], all_threads=False)


def stack_of(folder: Path, view: RankSnapshot) -> list[str]:
    """The stack of a rank's main thread, innermost first, as `file:line in function`; empty where
    it does not answer. A stopped process is continued for it.
    """
    path = stack_path(folder, view.rank)
    state = view.process_state()
    if not state or not path.exists():
        return []
    before = path.stat().st_size
    with contextlib.suppress(OSError):
        _signal_main_thread(view.pid)
        if state in ("T", "t"):
            os.kill(view.pid, signal.SIGCONT)
    end = time.monotonic() + ANSWER_SECONDS
    text = ""
    while time.monotonic() < end:
        time.sleep(0.02)
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace")[before:]
        if text.endswith("\n") and frames(text):
            break
    return frames(text)


def _signal_main_thread(pid: int) -> None:
    """Send the signal to the main thread of a process, whose number is that of the process.

    Where the C library has no `tgkill`, the system chooses the thread.
    """
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None:
        os.kill(pid, SIGNAL)
    else:
        tgkill(pid, pid, SIGNAL)


def frames(text: str) -> list[str]:
    """The frames of the last stack in what a process wrote, innermost first."""
    stack = text.rpartition(_HEADING)[2]
    return [f"{file}:{line} in {name}" for file, line, name in _FRAME.findall(stack)]


def line_of(stack: list[str]) -> str | None:
    """The frame that says most: the innermost of the user's code, else of plait's, else of all;
    with its text.
    """
    users = [one for one in stack if not one.startswith((_OWN, *_LIBRARIES, "<"))]
    own = [one for one in stack if one.startswith(_OWN)]
    chosen = next(iter([*users, *own, *stack]), None)
    if chosen is None:
        return None
    match = re.match(r"(.*):(\d+) in ", chosen)
    text = "" if match is None else linecache.getline(match[1], int(match[2])).strip()
    return f"{chosen}: {text}" if text else chosen
