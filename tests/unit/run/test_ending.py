"""The end that a signal asks for, where ranks agree among themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.comm import World
from plait.comm.simulated import simulate
from plait.launcher.hearing import ECHO_SECONDS, SIGNALS
from plait.mesh import Mesh
from plait.run.ending import EndByPeers


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes by which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.fixture
def ending(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[EndByPeers]:
    monkeypatch.setattr("plait.run.ending.LINGER_SECONDS", 1000.0)  # to leave a start; no test does
    before = {number: signal.getsignal(number) for number in SIGNALS}
    wakes = signal.set_wakeup_fd(-1)
    yield EndByPeers(1000.0)
    signal.set_wakeup_fd(wakes)
    for number, handler in before.items():
        signal.signal(number, handler)


def come_true(is_true: Callable[[], object]) -> bool:
    """Whether something becomes true in a moment. A thread hears the signals."""
    end = time.monotonic() + 10.0
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(is_true())


def test_the_second_signal_ends_a_rank_at_once(ending: EndByPeers, exits: list[int]) -> None:
    signal.raise_signal(signal.SIGUSR1)
    assert come_true(lambda: ending.signal == signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    assert come_true(lambda: exits == [143])


def test_the_word_of_a_peer_is_no_signal_of_its_own(ending: EndByPeers, exits: list[int]) -> None:
    """An agent that starts its ranks again signals them after those of another machine."""
    ending._begin(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    ending.linger()
    assert ending.signal == signal.SIGTERM
    time.sleep(2 * ECHO_SECONDS)
    signal.raise_signal(signal.SIGTERM)
    assert come_true(lambda: exits == [143])


def test_a_child_that_is_forked_tells_its_parent_of_no_signal(ending: EndByPeers) -> None:
    """A loader ends its workers by SIGTERM, which is none for the rank."""
    own, childs = os.pipe()
    child = os.fork()
    if not child:
        os.write(childs, b"is there")
        time.sleep(60.0)
    assert os.read(own, 8)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not ending.signal


def test_a_rank_that_waits_for_its_peers_in_native_code_hears_a_signal(tmp_path: Path) -> None:
    """Its peer never comes. No Python handler runs while it waits."""
    script = tmp_path / "waits.py"
    script.write_text(
        "from datetime import timedelta\n"
        "from torch.distributed import TCPStore\n"
        "from plait.run.ending import EndByPeers\n"
        "EndByPeers(1000.0)\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print('waits', flush=True)\n"
        "store.wait(['the peer'], timedelta(seconds=100))\n"
    )
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        try:
            assert rank.stdout.readline() == "waits\n"
            rank.send_signal(signal.SIGTERM)
            _, told = rank.communicate(timeout=60.0)
        finally:
            rank.kill()
    assert rank.returncode == 143
    assert "SIGTERM came while this rank waited for others to come" in told


@pytest.mark.parametrize(("machines", "again"), [("1", False), ("2", True)])
def test_a_signal_after_the_last_step_has_all_ranks_started_again(
    machines: str, again: bool, ending: EndByPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of one machine has seen another come, that of the other has not."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 // int(machines)))
    endings = [ending, EndByPeers(1000.0)]  # the newer one hears
    signal.raise_signal(signal.SIGTERM)
    assert come_true(lambda: endings[1].signal)

    def end(world: World) -> tuple[bool, int]:
        own = endings[world.rank].of(world)
        return own.starts_again(), own.signal

    told = simulate(Mesh(dp=2), end)
    assert told == ([(True, 15), (True, 15)] if again else [(False, 0), (False, 15)])


def test_ranks_that_nobody_has_signalled_end_well(
    ending: EndByPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    endings = [ending, EndByPeers(1000.0)]
    ends = simulate(Mesh(dp=2), lambda world: endings[world.rank].of(world).starts_again())
    assert ends == [False, False]


@pytest.mark.parametrize(("later", "ends"), [(False, 3), (True, 4)])
def test_ranks_end_before_one_step_whoever_has_the_signal(
    later: bool, ends: int, ending: EndByPeers
) -> None:
    """The second rank hears it before its step 3. A sum that is read later has it a step later."""
    endings = [EndByPeers(1000.0, reads_later=later) for _ in range(2)]

    def end(world: World) -> tuple[int, int]:
        own = endings[world.rank].of(world)
        for step in range(6):
            if step == 3 and world.rank == 1:
                own._begin(signal.SIGUSR1)
            if own.ends_before(step, lambda: None):
                return step, own.signal
        return -1, own.signal

    assert simulate(Mesh(dp=2), end) == [(ends, signal.SIGTERM), (ends, signal.SIGUSR1)]
