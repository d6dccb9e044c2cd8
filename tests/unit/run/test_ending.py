"""The end that a signal asks for, where ranks agree among themselves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from plait.comm import World
from plait.comm.simulated import simulate
from plait.launcher.hearing import ECHO_SECONDS, SIGNALS
from plait.mesh import Mesh
from plait.run.ending import EndByPeers


class Ended(Exception):
    """The process would have ended."""


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Iterator[EndByPeers]:
    def end(code: int) -> None:
        raise Ended(code)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(os, "_exit", end)
    yield EndByPeers(1000.0)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_second_signal_ends_a_rank_at_once(ending: EndByPeers) -> None:
    signal.raise_signal(signal.SIGUSR1)
    assert ending.signal == signal.SIGUSR1
    with pytest.raises(Ended, match="143"):
        signal.raise_signal(signal.SIGTERM)


def test_the_word_of_a_peer_is_no_signal_of_its_own(ending: EndByPeers) -> None:
    """An agent that starts its ranks again signals them after those of another machine."""
    ending._begin(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert ending.signal == signal.SIGTERM
    ending.linger()
    time.sleep(ECHO_SECONDS)
    with pytest.raises(Ended, match="143"):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("machines", "again"), [("1", False), ("2", True)])
def test_a_signal_after_the_last_step_has_all_ranks_started_again(
    machines: str, again: bool, ending: EndByPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of one machine has seen another come, that of the other has not."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 // int(machines)))
    endings = [ending, EndByPeers(1000.0)]  # the newer one hears
    signal.raise_signal(signal.SIGTERM)

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
