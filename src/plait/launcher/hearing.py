"""Signals by which a run is asked to end, and which of them count.

`timeout` sends its signal to the command, and then to the command's whole process group. So the
launcher gets it twice within a millisecond, though it was meant once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plait.imports import while_loading

ASKING = ("SIGTERM", "SIGUSR1")
"""Names of signals by which others than a terminal ask a run to end."""

SIGNALS = (
    signal.SIGINT,
    *(getattr(signal, name) for name in ASKING if hasattr(signal, name)),
)
ECHO_SECONDS = 0.1
"""Equal signals to one process within this time are one. A person takes longer to ask again."""


class Echoes:
    """Tells a second signal, which ends a process at once, from an echo of the first."""

    def __init__(self) -> None:
        self._number = 0
        self._moment = 0.0

    def has(self, number: int) -> bool:
        """Whether this signal is an echo of the last one that was none.

        It may interrupt itself while it reads the clock. Then the inner call counts.
        """
        now = time.monotonic()
        if number == self._number and now - self._moment < ECHO_SECONDS:
            return True
        self._number, self._moment = number, now
        return False


class Beginning:
    """The moments of a command before it starts its ranks. A signal then ends it, and is told."""

    def __init__(self) -> None:
        self.is_over = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """The beginning of a command. Handlers that this process has of its own stay."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.is_over = False
        numbers = [number for number in SIGNALS[1:] if signal.getsignal(number) is signal.SIG_DFL]
        for number in numbers:
            signal.signal(number, self._arrive)
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)

    def end(self) -> None:
        """Ranks are started from here on."""
        self.is_over = True

    def _arrive(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if self.is_over:
            signal.raise_signal(number)
            return
        sys.stderr.write(
            f"plait: {signal.Signals(number).name} came before the ranks were started; nothing "
            "has begun, and nothing is saved\n"
        )
        sys.stderr.flush()
        raise SystemExit(128 + number)


BEGINNING = Beginning()
"""The beginning of this process's command."""


@contextmanager
def interrupt_waits() -> Iterator[None]:
    """Have Ctrl-C count at the end of the block, and a second one at once.

    torch runs Python from C++ while it loads. An exception there aborts the process, or has it
    end by the signal whatever its exit code was. Handlers that this process has of its own stay.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    echoes = Echoes()
    waiting: list[int] = []

    def arrive(number: int, frame: object) -> None:
        if echoes.has(number):
            return
        if waiting:
            raise KeyboardInterrupt
        waiting.append(number)

    signal.signal(signal.SIGINT, arrive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if waiting:
        raise KeyboardInterrupt


def load_torch_uninterrupted() -> None:
    """Have Ctrl-C wait where this process loads torch. Too late once that has begun."""
    while_loading("torch", interrupt_waits)


def outlives_terminal() -> bool:
    """Whether this process ignores the end of its terminal, as by `nohup`, or hears of none."""
    hangup = getattr(signal, "SIGHUP", None)
    return hangup is None or signal.getsignal(hangup) is signal.SIG_IGN


@contextmanager
def heard(hear: Callable[[int, object], None]) -> Iterator[None]:
    """Have signals of this process call `hear`, where this is the thread that gets them.

    An echo of a signal calls nothing. The end of the terminal calls nothing where it is ignored.
    """
    BEGINNING.end()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    echoes = Echoes()

    def arrive(number: int, frame: object) -> None:
        if not echoes.has(number):
            hear(number, frame)

    numbers = SIGNALS if outlives_terminal() else (*SIGNALS, signal.SIGHUP)
    before = {number: signal.signal(number, arrive) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hear_beside(hear: Callable[[int, object], None]) -> None:
    """Have a thread of its own call `hear` with each signal of this process from here on.

    Python runs a handler between two lines of the main thread. A rank that waits for a peer in
    native code would hear nothing. Children that are forked have the system's handlers again.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def listen() -> None:
        while numbers := receiver.recv(64):
            for number in numbers:
                if number in SIGNALS:
                    hear(number, None)

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is not _leave_to_thread:
            return
        signal.set_wakeup_fd(-1)  # its other end is read by the parent
        sender.close()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    for number in SIGNALS:
        signal.signal(number, _leave_to_thread)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget)
    threading.Thread(target=listen, name="signals", daemon=True).start()


def _leave_to_thread(number: int, frame: object) -> None:
    """Do nothing: the system has told the thread already."""
