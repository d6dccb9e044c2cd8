"""A process of a run that is kept alive: how it starts, and what it does first."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from plait.launcher.agent import free_environment, num_threads, start_server
from plait.launcher.board import Board
from plait.launcher.rank import RankSettings, run_rank
from plait.launcher.seat import Seat

Main = Callable[..., object]


@dataclass(frozen=True)
class RunFacts:
    """The facts that every process of a run gets.

    Attributes:
        failures: the folder in which failures are left.
        board: the file of the page that all share.
        goes_on: whether the run goes on without a rank that is lost.
    """

    failures: Path
    board: Path
    num_seats: int
    goes_on: bool


@dataclass
class KeptProcess:
    """One process, the connection to it, when it was started, and whether it has come since."""

    process: BaseProcess
    line: Connection
    started: float = field(default_factory=time.monotonic)
    has_come: bool = False


def start_process(start: RunFacts, main: Main, args: tuple[object, ...], seat: int) -> KeptProcess:
    """Start `main(seat, *args)` in a new process."""
    context: Any = multiprocessing.get_context(start_server())
    ours, theirs = context.Pipe()
    told = {**free_environment(), "RANK": str(seat), "WORLD_SIZE": str(start.num_seats)}
    settings = RankSettings(start.failures, num_threads(start.num_seats), told)
    process = context.Process(
        target=_live, args=(theirs, (seat, start), settings, main, args), name=f"rank {seat}"
    )
    process.start()
    theirs.close()
    return KeptProcess(process, ours)


def _live(
    line: Connection,
    place: tuple[int, RunFacts],
    settings: RankSettings,
    main: Main,
    args: tuple[object, ...],
) -> None:
    """The life of a process."""
    number, start = place
    seat = Seat(number, Board(start.board, start.num_seats), line, start.goes_on)
    run_rank(settings, _listening, (seat, main, args))
    line.close()
    os._exit(0)


def _listening(seat: Seat, main: Main, args: tuple[object, ...]) -> None:
    seat.listen()
    main(seat, *args)
