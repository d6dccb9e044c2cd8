"""The surroundings of `main` inside one rank.

A rank must end whatever happens. It dies with its launcher and writes its error to a file before it
goes. It leaves by `os._exit`, since the interpreter's own end may wait for a collective that no
peer joins.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from plait.comm.shm.departure import depart
from plait.errors import PlaitError, RankFailed
from plait.launcher.allocator import forget_tunables, keep_freed_memory
from plait.launcher.failure import Failure
from plait.launcher.result import check_sendable

T = TypeVar("T")

# A rank whose peer died fails too, a moment later, with "connection closed". It waits this long
# before it goes, so that
# the agent sees the first death first and names the cause instead of a consequence.
AFTERMATH_SECONDS = 0.5
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


@dataclass(frozen=True)
class RankSettings:
    """The launcher's orders to each rank: where to write its failure, its number of threads, its
    environment.
    """

    failures: Path
    num_threads: int
    environment: Mapping[str, str]


def run_rank(settings: RankSettings, main: Callable[..., T], args: tuple[object, ...]) -> T:
    """Run `main(*args)` in this process, which is a rank; does not return when it fails."""
    die_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C reaches every rank: end at once, the launcher speaks for all
    forget_tunables()
    os.environ.update(
        settings.environment
    )  # the fork server keeps the variables of the moment it was started
    keep_freed_memory()

    import torch

    torch.set_num_threads(settings.num_threads)
    try:
        result = main(*args)
        check_sendable(result)
        depart()
        return result
    except BaseException as error:
        _leave(settings, error)


def _leave(settings: RankSettings, error: BaseException) -> NoReturn:
    rank = int(os.environ["RANK"])
    with contextlib.suppress(OSError):  # the exit code still tells that it failed
        Failure.of(error, rank).write(settings.failures)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if not isinstance(error, PlaitError) or isinstance(error, RankFailed):
        time.sleep(AFTERMATH_SECONDS)
    os._exit(error.exit_code if isinstance(error, PlaitError) else 1)


def die_with_parent() -> None:
    """End this process when its requester is gone, even by SIGKILL. A fork server would keep it
    alive.
    """
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return
    _wake_with_server()

    def watch(sentinel: int) -> None:
        multiprocessing.connection.wait([sentinel])
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    threading.Thread(
        target=watch, args=(launcher.sentinel,), name="launcher-watch", daemon=True
    ).start()


def _wake_with_server() -> None:
    """Have the system wake this process when the fork server ends, as it does with the launcher.

    A process that is stopped has no thread that could watch. The server lives as long as somebody
    holds its pipe, which it hands to each process that it forks. A server that a signal to the
    whole group ends leaves its ranks alive: they save first.
    """
    server: Any = multiprocessing.forkserver._forkserver
    held = server._forkserver_alive_fd
    if not sys.platform.startswith("linux") or held is None or server._forkserver_pid is not None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    os.close(held)
