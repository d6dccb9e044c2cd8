"""A run with restarts ends by a signal, also one that whoever started it has ignored."""

from __future__ import annotations

import signal

import pytest

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
