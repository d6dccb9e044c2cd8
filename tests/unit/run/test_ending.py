"""The end that a signal asks for, where ranks agree among themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from plait.launcher.seat import SIGNALS
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
    with pytest.raises(Ended, match="143"):
        signal.raise_signal(signal.SIGTERM)
