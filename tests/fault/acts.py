"""What is done to a run: ranks, their server or their launcher are killed, stopped or signalled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from plait.doctor.flight import Phase
from tests.fault.disturbed import Run, send


def killed(*ranks: int, at: int = 3) -> Callable[[Run], None]:
    """SIGKILL to ranks once so many steps are done."""

    def act(run: Run) -> None:
        run.wait_until(lambda: run.steps() >= at)
        run.kill(*ranks)

    return act


def signalled(number: int, whom: str, at: int = 3) -> Callable[[Run], None]:
    """A signal to the launcher, a rank, or all of them at once."""

    def act(run: Run) -> None:
        run.wait_until(lambda: run.steps() >= at)
        if whom == "launcher":
            send(run.process.pid, number)
        elif whom == "group":
            os.killpg(run.process.pid, number)
        elif whom == "everybody":
            for pid in run.processes():
                send(pid, number)
        else:
            run.kill(int(whom), number=number)

    return act


def while_saving(run: Run) -> None:
    """A rank is killed while a checkpoint is written."""
    saves = run.folder / "checkpoints"
    run.wait_until(lambda: run.steps() >= 2 and any(saves.glob("step-*.tmp-*")))
    run.kill(1)


def in_phase(phase: Phase, rank: int = 1) -> Callable[[Run], None]:
    """A rank is killed in a phase of the run."""

    def act(run: Run) -> None:
        def is_there() -> bool:
            view = run.views().get(rank)
            return view is not None and view.phase is phase

        if run.wait_until(is_there):
            run.kill(rank)

    return act


def at_the_start(seconds: float) -> Callable[[Run], None]:
    """A process that has just been started is killed, before its first step."""

    def act(run: Run) -> None:
        run.wait_until(lambda: len(ranks_of(run)) >= 2)
        time.sleep(seconds)
        send(max(ranks_of(run)), signal.SIGKILL)

    return act


def ranks_of(run: Run) -> list[int]:
    """The processes that the fork server has made."""
    servers = [pid for pid, words in run.processes().items() if "forkserver" in words]
    return [pid for pid in servers if _parent(pid) in servers]


def fork_server(run: Run) -> int:
    """The process that ranks are forked from."""
    return next((pid for pid in {_parent(one) for one in ranks_of(run)}), 0)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def again_and_again(*moments: tuple[int, float]) -> Callable[[Run], None]:
    """Ranks are killed one after the other, each so many seconds after the one before."""

    def act(run: Run) -> None:
        run.wait_until(lambda: run.steps() >= 3)
        for rank, seconds in moments:
            time.sleep(seconds)
            run.kill(rank)

    return act


def stopped_at_the_start(seconds: float) -> Callable[[Run], None]:
    """A process that has just been started is stopped, before its first step."""

    def act(run: Run) -> None:
        run.wait_until(lambda: len(ranks_of(run)) >= 2)
        time.sleep(seconds)
        send(max(ranks_of(run)), signal.SIGSTOP)

    return act


def stopped_in_the_recovery(seconds: float) -> Callable[[Run], None]:
    """A survivor is stopped while another rank is started again."""

    def act(run: Run) -> None:
        run.wait_until(lambda: run.steps() >= 3)
        survivor = run.rank(0)
        run.kill(1)
        time.sleep(seconds)
        send(survivor, signal.SIGSTOP)

    return act


def slow_newcomer(run: Run) -> None:
    """A rank that is started again gets there slowly, while the others wait for it."""
    run.wait_until(lambda: run.steps() >= 3)
    before = set(ranks_of(run))
    run.kill(1)
    run.wait_until(lambda: bool(set(ranks_of(run)) - before))
    for newcomer in set(ranks_of(run)) - before:
        for _ in range(4):
            send(newcomer, signal.SIGSTOP)
            time.sleep(3.0)
            send(newcomer, signal.SIGCONT)
            time.sleep(0.05)


def twice_to_a_rank(run: Run) -> None:
    """One rank is stopped, so that no step ends; another gets two signals."""
    run.wait_until(lambda: run.steps() >= 3)
    other = run.rank(0)
    run.kill(1, number=signal.SIGSTOP)
    for _ in range(2):
        send(other, signal.SIGTERM)
        time.sleep(0.3)


def server_killed_too(run: Run) -> None:
    """The process that ranks are forked from is killed, then a rank."""
    run.wait_until(lambda: run.steps() >= 3)
    send(fork_server(run), signal.SIGKILL)
    time.sleep(0.2)
    run.kill(1)


def rank_then_signal(run: Run) -> None:
    """The end of the job comes while a rank is started again."""
    run.wait_until(lambda: run.steps() >= 3)
    run.kill(1)
    time.sleep(0.3)
    send(run.process.pid, signal.SIGUSR1)


def all_in_the_recovery(run: Run) -> None:
    """The end of the job is told to all processes while a rank is started again."""
    run.wait_until(lambda: run.steps() >= 3)
    before = set(ranks_of(run))
    run.kill(1)
    run.wait_until(lambda: bool(set(ranks_of(run)) - before))
    for pid in run.processes():
        send(pid, signal.SIGTERM)


def early_signal(run: Run) -> None:
    """The end of the job comes before the first step."""
    run.wait_until(lambda: len(ranks_of(run)) >= 2)
    send(run.process.pid, signal.SIGTERM)
