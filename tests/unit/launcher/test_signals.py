"""A signal ends a run, also one that whoever started it has ignored; an echo of it ends nothing."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from plait.launcher.hearing import BEGINNING, ECHO_SECONDS, SIGNALS, heard, interrupt_waits
from plait.launcher.seat import Seat
from plait.launcher.supervisor import _ended_by_signals


def test_a_signal_that_was_ignored_ends_the_run() -> None:
    """As under a shell that starts its commands in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), _ended_by_signals():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_end_of_a_terminal_that_was_ignored_ends_nothing() -> None:
    """As under `nohup`."""
    came = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with heard(lambda number, frame: came.append(number)), _ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert came == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_waits_for_the_end_of_what_is_held_and_counts_once() -> None:
    done = []
    with pytest.raises(SystemExit) as ended, _ended_by_signals() as signals:
        with signals.held():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            done.append("held")
        done.append("never")
    assert ended.value.code == 128 + signal.SIGTERM
    assert done == ["held"]


def test_a_first_interrupt_waits_for_the_end_of_a_block_and_a_second_one_does_not() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = []
    try:
        with pytest.raises(KeyboardInterrupt), interrupt_waits():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # its echo
            done.append("waited")
            time.sleep(ECHO_SECONDS)
            signal.raise_signal(signal.SIGINT)
            done.append("never")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["waited"]


def test_a_handler_of_ones_own_is_not_held_back() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with interrupt_waits():
            signal.raise_signal(signal.SIGINT)
            assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_ranks_is_told(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, BEGINNING.heard():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number
    told = capsys.readouterr().err
    assert f"{number.name} came before the ranks were started; nothing has begun" in told


def test_a_signal_behind_the_ranks_is_not_one_of_the_beginning() -> None:
    with BEGINNING.heard():
        with heard(lambda number, frame: None):
            pass
        assert BEGINNING.is_over
    with BEGINNING.heard():
        assert not BEGINNING.is_over


def test_a_handler_that_was_there_before_the_ranks_stays() -> None:
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with BEGINNING.heard():
            signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_an_equal_signal_that_follows_at_once_is_an_echo(number: int) -> None:
    """As `timeout` sends it: to the command, and then to its whole process group."""
    came = []
    with heard(lambda number, frame: came.append(number)):
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert came == [number]
        time.sleep(ECHO_SECONDS)
        signal.raise_signal(number)
        assert came == [number, number]


def test_another_signal_that_follows_at_once_is_no_echo() -> None:
    came = []
    with heard(lambda number, frame: came.append(number)):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert came == [signal.SIGUSR1, signal.SIGTERM]


def test_an_echo_does_not_end_a_rank_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    killed = []
    board: Any = SimpleNamespace(ask_to_end=asked.append)
    unused: Any = None
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        Seat(0, board, unused, goes_on=True).listen()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (asked, killed) == ([signal.SIGTERM], [])
        time.sleep(ECHO_SECONDS)
        signal.raise_signal(signal.SIGTERM)
        assert killed == [signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_echo_does_not_end_a_run_with_restarts_at_once() -> None:
    asked: list[int] = []
    board: Any = SimpleNamespace(ask_to_end=asked.append)
    with pytest.raises(SystemExit) as ended, _ended_by_signals(board):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        asked.append(0)  # it is reached
        time.sleep(ECHO_SECONDS)
        signal.raise_signal(signal.SIGTERM)
    assert asked == [signal.SIGTERM, 0]
    assert ended.value.code == 128 + signal.SIGTERM
