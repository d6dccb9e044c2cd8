"""Ranks that are started again when they die, while the others go on; the counterpart of `agent`,
which ends them all.

torch's agent restarts the whole group when one of its ranks dies: the group is broken. The ranks
need no group to live here (`plait.comm.membership`), so each is a process of its own. This process
keeps what outlives any of them: the rendezvous and a store.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from plait.comm.membership import RendezvousPlace
from plait.comm.network import LOOPBACK, listening_store
from plait.comm.rendezvous import RendezvousServer
from plait.errors import PlaitError, RankFailed
from plait.launcher.agent import free_environment, num_threads, start_server
from plait.launcher.failure import died_silently, read_failures
from plait.launcher.leftovers import leftovers
from plait.launcher.rank import RankSettings, run_rank

T = TypeVar("T")
TOLD_SECONDS = 0.2


@dataclass
class _Rank:
    """One rank's process, and where its result comes from."""

    process: Any
    results: Connection


def supervise(
    main: Callable[..., T], args: tuple[object, ...], nproc: int, restarts: int
) -> dict[int, T]:
    """Results of the ranks that came to an end, by rank. Failures that no restart can cure are
    raised.
    """
    context: Any = multiprocessing.get_context(start_server())
    rendezvous = RendezvousServer(nproc, host=LOOPBACK)
    store = listening_store()
    place = RendezvousPlace(0, nproc, rendezvous.address, (LOOPBACK, store.port))
    ranks: dict[int, _Rank] = {}
    results: dict[int, T] = {}
    with leftovers() as failures, _ended_by_signals() as signals:

        def start(rank: int) -> None:
            with signals.held():  # a rank that is started is also known, and so is ended
                begin(rank)

        def begin(rank: int) -> None:
            variables = {**free_environment(), **replace(place, worker=rank).as_variables()}
            ours, theirs = context.Pipe(duplex=False)
            settings = RankSettings(failures, num_threads(nproc), variables)
            process = context.Process(
                target=_live, args=(theirs, settings, main, args), name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            ranks[rank] = _Rank(process, ours)

        try:
            for rank in range(nproc):
                start(rank)
            while ranks:
                for rank in _ended(ranks):
                    ended = ranks.pop(rank)
                    found, code = _result(ended)
                    if found is not None:
                        results[rank] = found[0]
                        continue
                    if code in (-signal.SIGINT, -signal.SIGTERM):
                        _end_if_told(-code)
                    rendezvous.state.lost(rank)
                    error = _error(failures, rank, code)
                    if not isinstance(error, RankFailed) or (not results and not ranks):
                        raise error
                    if restarts and not results:
                        restarts -= 1
                        start(rank)
        finally:
            with signals.held():
                for one in ranks.values():
                    one.process.kill()
                for one in ranks.values():
                    _result(one)
                rendezvous.close()
    return results


class _Signals:
    """SIGINT, SIGTERM and SIGHUP end the run by an exception, once, so that ranks end too."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: int | None = None

    def arrive(self, number: int, frame: object) -> None:
        """The handler. A signal after the first changes nothing: the run is ending."""
        if self._is_held:
            self._waiting = self._waiting or number
            return
        self._is_held = True
        self._raise(number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block that is not interrupted; a signal that arrives meanwhile counts at its end."""
        was_held = self._is_held
        self._is_held = True
        yield
        self._is_held = was_held
        if self._waiting is not None and not was_held:
            self._is_held = True
            self._raise(self._waiting)

    @staticmethod
    def _raise(number: int) -> NoReturn:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


@contextmanager
def _ended_by_signals() -> Iterator[_Signals]:
    """Signals of this process end the run, where this is the thread that gets them."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signals.arrive) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_if_told(number: int) -> None:
    """A terminal's Ctrl-C reaches ranks before the launcher: the run is to end, not the rank.

    A rank alone that somebody has signalled is started again.
    """
    time.sleep(TOLD_SECONDS)  # the launcher's own signal arrives in here and raises
    if number == signal.SIGINT:
        raise KeyboardInterrupt


def _live(
    results: Connection, settings: RankSettings, main: Callable[..., T], args: tuple[object, ...]
) -> None:
    """The life of a rank."""
    results.send_bytes(
        pickle.dumps(run_rank(settings, main, args))
    )  # whole: the memory of a rank ends with it
    results.close()
    os._exit(0)


def _ended(ranks: dict[int, _Rank]) -> list[int]:
    """The ranks that have a result, or are gone. Waits for one."""
    ready = wait([one.results for one in ranks.values()])
    return [rank for rank, one in ranks.items() if one.results in ready]


def _result(rank: _Rank) -> tuple[tuple[Any] | None, int]:
    """(the result in a tuple, or None; the exit code) of a rank that has ended or is about to."""
    found: tuple[Any] | None = None
    with suppress(EOFError, ConnectionResetError):
        found = (pickle.loads(rank.results.recv_bytes()),)
    rank.results.close()
    rank.process.join()
    return found, int(rank.process.exitcode)


def _error(failures: Path, rank: int, code: int) -> PlaitError:
    """The failure that a rank reported, or how it died."""
    reported = [failure for failure in read_failures(failures) if failure.rank == rank]
    if not reported:
        return died_silently(rank, code)
    (failures / f"rank{rank}.json").unlink()
    return reported[0].as_error()
