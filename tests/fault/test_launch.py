"""A rank that fails ends the run: the right error first, within seconds, and no process stays
behind.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plait import errors, launch
from plait.launcher import supervisor
from plait.launcher.allocator import CHOICES, TUNABLES
from tests.fault import jobs
from tests.fault.processes import children, wait_until_gone

ROOT = Path(__file__).parents[2]


def test_results_come_back_rank_by_rank() -> None:
    assert launch(jobs.own_rank, 10, nproc=3) == [0, 10, 20]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    num_cores = len(os.sched_getaffinity(0))
    assert launch(jobs.own_threads, nproc=2) == [max(1, num_cores // 2)] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(jobs.own_threads, nproc=1) == [3]


def test_ranks_see_the_environment_of_now_though_the_fork_server_is_older(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in ("a", "b"):
        monkeypatch.setenv("PLAIT_TEST_VARIABLE", value)
        assert launch(jobs.variable, "PLAIT_TEST_VARIABLE", nproc=1) == [value]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to")
def test_a_rank_keeps_the_memory_that_it_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
    assert launch(jobs.heap_given_back, nproc=1) == [0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to")
def test_a_rank_uses_the_memory_of_freed_tensors_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the ranks of other tests are forked from another server."""
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
    words = (sys.executable, "-m", "tests.fault.jobs", "freed")
    answer = subprocess.run(
        words, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert answer.stdout.strip() == "[True]", answer.stderr
    assert launch(jobs.variable, TUNABLES, nproc=1) == [None]


TYPED = """
import os
import threading
import plait
FACTOR = 10
def own(words):
    return FACTOR * int(os.environ["RANK"]), helper(words)
def helper(words):
    return type(words).__name__
class Words:
    pass
print(plait.launch(own, Words(), nproc=2))
try:
    plait.launch(own, threading.Lock(), nproc=2)
except plait.errors.PlaitError as error:
    print(error)
"""


PACKAGED = """
import os
import plait
from mine import FACTOR
class Words:
    pass
def main(words):
    return FACTOR * int(os.environ["RANK"]), type(words).__name__
if __name__ == "__main__":
    print(plait.launch(main, Words(), nproc=2))
"""


@pytest.mark.parametrize("way", ["-c", "-"])
def test_a_function_without_a_file_is_launched(way: str) -> None:
    """As it is typed into an interpreter or a notebook."""
    words = ["-c", TYPED] if way == "-c" else ["-"]
    done = subprocess.run(
        [sys.executable, *words],
        input=TYPED,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    first, second = done.stdout.splitlines()
    assert first == "[(0, 'Words'), (10, 'Words')]", done.stderr
    assert "cannot be sent to a new process" in second


@pytest.mark.parametrize("words", [("-m", "mine"), ("mine",)])
def test_the_main_module_of_a_package_is_launched(words: tuple[str, ...], tmp_path: Path) -> None:
    """Its function is called `main`, as one of the module that starts a rank is."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("FACTOR = 10\n")
    (package / "__main__.py").write_text(PACKAGED)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["[(0, 'Words'), (10, 'Words')]"], done.stderr


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("killed", errors.RankFailed, "rank 1 was killed by SIGKILL"),
        ("known", errors.NonFiniteLoss, "the loss became nan at step 7"),
        ("bug", errors.RankFailed, "rank 1 failed: ZeroDivisionError: by zero"),
        ("exit", errors.RankFailed, "rank 1 failed: SystemExit"),
        ("native exit", errors.RankFailed, "rank 1 ended with exit code 3"),
    ],
)
def test_the_first_error_is_raised_and_every_rank_is_gone(
    kind: str, error: type[Exception], message: str
) -> None:
    before = set(multiprocessing.active_children())  # of other tests; the list has no order
    with pytest.raises(error, match=message):
        launch(jobs.fail, kind, nproc=2)
    assert set(multiprocessing.active_children()) == before


def test_the_signal_handlers_of_the_caller_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    launch(jobs.own_rank, nproc=1)
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == before


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_launcher_that_ignores_the_end_of_its_terminal_goes_on(restarts: int) -> None:
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch(jobs.hang_up, os.getpid(), nproc=1, restarts=restarts) == [0]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_launcher(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.fault.jobs"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as launcher:
        assert launcher.stdout is not None
        ranks = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(number)
        launcher.wait(20)
        wait_until_gone(ranks)


def test_a_stopped_rank_ends_with_its_launcher() -> None:
    """It has no thread that could see the launcher go: the system wakes it once its server ends."""
    command = [sys.executable, "-m", "tests.fault.jobs"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as launcher:
        assert launcher.stdout is not None
        ranks = [int(launcher.stdout.readline()) for _ in range(2)]
        everyone = children(launcher.pid)
        assert set(ranks) < set(everyone)
        os.kill(ranks[0], signal.SIGSTOP)
        launcher.kill()
        launcher.wait(20)
        try:
            wait_until_gone(everyone)
        finally:
            with suppress(ProcessLookupError):
                os.kill(ranks[0], signal.SIGKILL)


def test_a_signal_in_the_midst_of_the_end_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a second Ctrl-C while ranks are being ended: it counts when all are gone."""
    original = supervisor._result
    given = iter([None, signal.SIGINT])  # the first is the rank that fails

    def interrupted(rank: supervisor._Rank) -> tuple[tuple[Any] | None, int]:
        number = next(given, None)
        if number is not None:
            signal.raise_signal(number)
        return original(rank)

    monkeypatch.setattr(supervisor, "_result", interrupted)
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        launch(jobs.first_fails, nproc=3, restarts=1)
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.kill()
    assert not left


def test_a_rank_whose_function_returns_early_is_named_to_those_that_wait() -> None:
    with pytest.raises(errors.RankFailed, match=r"rank 1.* has left: its part of the run is over"):
        launch(jobs.stops_early, nproc=2)
