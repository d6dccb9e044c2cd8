"""torch's elastic agent, set up for ranks of one machine that start fast and end together.

Ranks are forked from a server that has torch loaded. With torch 2.13 on two cores a second launch
takes 0.2 s, against 2.1 s by spawn. The server is asked to load while this process loads the agent
itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from plait.comm.network import LOOPBACK, loopback_interface, variables_of
from plait.launcher.allocator import no_small_lists
from plait.launcher.failure import died_silently, read_failures
from plait.launcher.hearing import outlives_terminal
from plait.launcher.interrupts import interrupts_held
from plait.launcher.leftovers import leftovers
from plait.launcher.limits import check_limits
from plait.launcher.rank import RankSettings, run_rank
from plait.systems import check_system, own_cores
from plait.values import JsonObject

T = TypeVar("T")

SHUTDOWN_SECONDS = 5
_SHUTDOWN_OPTION = "shutdown_timeout"
_PRELOADED = [
    "plait.launcher.interrupts",  # first, since Ctrl-C may come at any moment
    "plait.launcher.lean", "torch", "torch.distributed", "plait.run.preloaded",
    "torch.distributed.nn.functional",  # its functions keep the group of the moment of its import
]  # fmt: skip
_AGENT_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_AGENT_ENDINGS = ("WORLD_SIZE",)
_AGENT_BEGINNINGS = ("TORCHELASTIC_",)
_AGENT_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)  # Windows lacks two
)


def run_ranks(
    main: Callable[..., T], args: tuple[object, ...], nproc: int, monitor_seconds: float
) -> dict[int, T]:
    """Results by rank; raises the first error of any rank (see `launch`)."""
    start_method = start_server()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from plait.launcher import rendezvous

    rendezvous.register()
    with (
        leftovers() as folder,
        _signals_restored(),
        _quiet_agent(),
    ):
        failures = folder / "failures"
        failures.mkdir()
        config: JsonObject = {
            "min_nodes": 1,
            "max_nodes": 1,
            "nproc_per_node": nproc,
            "run_id": uuid.uuid4().hex,
            "rdzv_backend": rendezvous.NAME,
            "local_addr": LOOPBACK,
            "max_restarts": 0,
            "monitor_interval": monitor_seconds,
            "start_method": start_method,
            "signals_to_handle": ",".join(number.name for number in _signals_that_end()),
            "logs_specs": DefaultLogsSpecs(log_dir=str(folder / "agent")),
            **shutdown_option(LaunchConfig),
        }
        agent = elastic_launch(LaunchConfig(**config), run_rank)
        settings = RankSettings(failures, num_threads(nproc), free_environment())
        try:
            return dict(agent(settings, main, args))
        except ChildFailedError as error:
            raise _first_error(error, failures) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None


def shutdown_option(config: Any) -> JsonObject:
    """How long ranks have to end, as an option of torch's agent.

    Torch 2.11 has no such option: there a rank that does not end is killed after half a minute.
    """
    has_option = any(field.name == _SHUTDOWN_OPTION for field in dataclasses.fields(config))
    return {_SHUTDOWN_OPTION: SHUTDOWN_SECONDS} if has_option else {}


def _signals_that_end() -> list[signal.Signals]:
    """Signals that the agent takes over: not the end of a terminal that this process ignores."""
    left = (signal.SIGHUP,) if outlives_terminal() else ()
    return [number for number in _AGENT_SIGNALS if number not in left]


def num_threads(nproc: int) -> int:
    """Threads for each of `nproc` ranks: the user's OMP_NUM_THREADS, else an equal share of the
    cores.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    return max(1, len(own_cores()) // nproc)


def _first_error(error: Any, failures: Path) -> BaseException:
    """The cause: a rank that died without a word came before the ranks that noticed; else the
    earliest word.
    """
    rank, process = error.get_first_failure()
    told = read_failures(failures)
    if any(failure.rank == rank for failure in told):
        return told[0].as_error()
    if process.exitcode == -signal.SIGINT:
        return KeyboardInterrupt()
    return died_silently(rank, process.exitcode)


def free_environment() -> dict[str, str]:
    """This process's variables, without those by which the agent tells each rank who it is. Ranks
    of one machine listen on loopback alone.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if not (
            name in _AGENT_VARIABLES
            or name.endswith(_AGENT_ENDINGS)
            or name.startswith(_AGENT_BEGINNINGS)
        )
    }
    return {**variables, **variables_of(loopback_interface())}


def start_server(*more: str) -> str:
    """Set the fork server to loading torch, and more modules, and say which start method to use.

    The first call of a process starts it, so that later ones add nothing. On macOS every rank loads
    torch itself, as Python's own processes do there: system libraries may fail after a fork.

    Raises:
        RunError: on Windows, and where no more files can be opened.
    """
    check_system()
    check_limits()
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    if sys.platform == "darwin" or not has_server:
        return "spawn"
    multiprocessing.set_forkserver_preload([*_PRELOADED, *more])
    multiprocessing.resource_tracker.ensure_running()  # which would end the hold below
    with no_small_lists(), interrupts_held():
        multiprocessing.forkserver.ensure_running()
    return "forkserver"


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """The agent takes over four signals and keeps them; give them back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _AGENT_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs a traceback of its own for each failure; the error that is raised says it
    better.
    """
    known = [
        name
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed.elastic")
    ]
    loggers = [
        logging.getLogger(name)
        for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn", *known)
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
