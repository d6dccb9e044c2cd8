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
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from plait.comm.membership import RendezvousPlace
from plait.comm.network import LOOPBACK, listening_store
from plait.comm.rendezvous import RendezvousServer
from plait.errors import PlaitError, RankFailed
from plait.launcher.agent import free_environment, num_threads, start_server
from plait.launcher.board import NOTHING, Board, Files, Page
from plait.launcher.failure import died_silently, read_failures
from plait.launcher.hearing import BEGINNING, Echoes, outlives_terminal
from plait.launcher.leftovers import leftovers
from plait.launcher.policy import deadline_passed
from plait.launcher.rank import RankSettings, run_rank

T = TypeVar("T")
TOLD_SECONDS = 0.2
LOOK_SECONDS = 0.1


@dataclass
class _Rank:
    """One rank's process, and where its result comes from."""

    process: BaseProcess
    results: Connection
    is_first: bool  # whether no rank was lost from its seat before


def supervise(
    main: Callable[..., T],
    args: tuple[object, ...],
    nproc: int,
    restarts: int,
    deadline_seconds: float | None = None,
) -> dict[int, T]:
    """Results of the ranks that came to an end, by rank. Failures that no restart can cure are
    raised.

    With a deadline the first argument of `main` is a `Page`. The ranks end by themselves when a
    signal is on it. Errors: `RunError` when they have not done so by then.
    """
    with leftovers() as folder:
        files = Files(folder)
        page = Page(files.make(), nproc)
        board = page.open()
        try:
            with _ended_by_signals(None if deadline_seconds is None else board) as signals:
                told = args if deadline_seconds is None else (page, *args)
                group = _Group(main, told, board, signals, folder)
                ending = _Ending(group, board, deadline_seconds)
                try:
                    return group.until_done(restarts, ending)
                finally:
                    group.end()
        finally:
            board.close()
            files.close()


class _Group:
    """The processes of ranks that come and go, and their rendezvous."""

    def __init__(
        self,
        main: Callable[..., object],
        args: tuple[object, ...],
        board: Board,
        signals: _Signals,
        folder: Path,
    ) -> None:
        nproc = board.num_seats
        self.ranks: dict[int, _Rank] = {}
        self._main = main
        self._args = args
        self._board = board
        self._signals = signals
        self._failures = folder
        self._num_ranks = nproc
        self._context: Any = multiprocessing.get_context(start_server())
        self._rendezvous = RendezvousServer(nproc, host=LOOPBACK)
        self._store = listening_store()
        store = (LOOPBACK, self._store.port)
        self._place = RendezvousPlace(0, nproc, self._rendezvous.address, store)

    def until_done(self, restarts: int, ending: _Ending) -> dict[int, Any]:
        """Start the ranks, and start those that are lost again; the results by rank."""
        results: dict[int, Any] = {}
        for rank in range(self._num_ranks):
            self._start(rank)
        while self.ranks:
            ending.look()
            for rank in _ended(self.ranks):
                ended = self.ranks.pop(rank)
                found, code = _result(ended)
                self._board.leave(rank)
                if found is not None:
                    results[rank] = found[0]
                    continue
                if code in (-signal.SIGINT, -signal.SIGTERM):
                    _end_if_told(-code)
                self._rendezvous.state.lost(rank)
                error = _error(self._failures, rank, code)
                if not isinstance(error, RankFailed) or (not results and not self.ranks):
                    raise error
                if restarts and not results and not ending.is_near:
                    restarts -= 1
                    self._start(rank, is_first=False)
        return results

    def end(self) -> None:
        """Leave no process behind."""
        with self._signals.held():
            for one in self.ranks.values():
                one.process.kill()
            for one in self.ranks.values():
                _result(one)
            self._rendezvous.close()

    def _start(self, rank: int, *, is_first: bool = True) -> None:
        with self._signals.held():  # a rank that is started is also known, and so is ended
            self._board.enter(rank)
            variables = {**free_environment(), **replace(self._place, worker=rank).as_variables()}
            ours, theirs = self._context.Pipe(duplex=False)
            settings = RankSettings(self._failures, num_threads(self._num_ranks), variables)
            process = self._context.Process(
                target=_live,
                args=(theirs, settings, self._main, self._args),
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self.ranks[rank] = _Rank(process, ours, is_first)


class _Ending:
    """The end that a signal asks for, as the launcher sees it."""

    def __init__(self, group: _Group, board: Board, deadline_seconds: float | None) -> None:
        self._group = group
        self._board = board
        self._deadline_seconds = deadline_seconds
        self._asked_at: float | None = None

    @property
    def is_near(self) -> bool:
        """Whether a signal has asked for the end."""
        return bool(self._board.signal)

    def look(self) -> None:
        """Admit no rank once the end is near; raise when its time is over."""
        if self._deadline_seconds is None or not self.is_near:
            return
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            for number, rank in self._group.ranks.items():
                if not rank.is_first and self._board.begun(number) == NOTHING:
                    rank.process.kill()  # the others would wait for it
        if now - self._asked_at > self._deadline_seconds:
            raise deadline_passed(self._board.signal, self._deadline_seconds)


class _Signals:
    """Signals end the run by an exception, once, so that ranks end too.

    With a board the first one is left there, for ranks that end by themselves; SIGHUP never is.
    """

    def __init__(self, board: Board | None = None) -> None:
        self._board = board
        self._echoes = Echoes()
        self._is_held = False
        self._waiting: int | None = None

    def arrive(self, number: int, frame: object) -> None:
        """The handler. Where the run ends at once, a signal after the first changes nothing."""
        if self._echoes.has(number):
            return
        if self._board is not None and number != signal.SIGHUP:
            self._board.ask_to_end(number)
            self._board = None
            return
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
def _ended_by_signals(board: Board | None = None) -> Iterator[_Signals]:
    """Signals of this process end the run, where this is the thread that gets them."""
    BEGINNING.end()
    signals = _Signals(board)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if not outlives_terminal():
        numbers.append(signal.SIGHUP)
    if board is not None:
        numbers.append(signal.SIGUSR1)
    before = {number: signal.signal(number, signals.arrive) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_if_told(number: int) -> None:
    """A terminal's Ctrl-C reaches ranks before the launcher: the run is to end, not the rank.

    A single rank that got a signal from outside is started again.
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
    """The ranks that have a result, or are gone. Waits a moment for one."""
    ready = wait([one.results for one in ranks.values()], LOOK_SECONDS)
    return [rank for rank, one in ranks.items() if one.results in ready]


def _result(rank: _Rank) -> tuple[tuple[Any] | None, int]:
    """(the result in a tuple, or None; the exit code) of a rank that has ended or is about to."""
    found: tuple[Any] | None = None
    with suppress(EOFError, ConnectionResetError):
        found = (pickle.loads(rank.results.recv_bytes()),)
    rank.results.close()
    rank.process.join()
    return found, rank.process.exitcode or 0


def _error(failures: Path, rank: int, code: int) -> PlaitError:
    """The failure that a rank reported, or how it died."""
    reported = [failure for failure in read_failures(failures) if failure.rank == rank]
    if not reported:
        return died_silently(rank, code)
    (failures / f"rank{rank}.json").unlink()
    return reported[0].as_error()
