"""A wait for a peer ends soon after the world is cut, without a look at the peer before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.comm.severance import Severance
from plait.comm.shm import processes
from plait.comm.shm.fabric import Signal
from plait.comm.shm.processes import Control, Identity, SharedFabric
from plait.comm.shm.semaphores import available
from plait.errors import RankFailed

pytestmark = pytest.mark.skipif(not available(), reason="needs semaphores of Linux")


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each wait, none of which sees its semaphore."""
    seconds: list[float] = []

    def take(self: Any, index: int, timeout_seconds: float) -> bool:
        seconds.append(timeout_seconds)
        clock.now += timeout_seconds
        return False

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(processes.Semaphores, "take", take)
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock.now)
    return seconds


def fabric(monkeypatch: pytest.MonkeyPatch, looks: list[float], severance: Severance) -> Any:
    """A rank of two whose looks at its peer are counted; the peer lives for four of them."""

    def alive(self: Identity) -> bool:
        looks.append(processes.time.monotonic())
        return len(looks) < 4

    monkeypatch.setattr(Identity, "alive", alive)
    whole = torch.zeros(Control.num_bytes(2), dtype=torch.uint8)
    memory: Any = SimpleNamespace(severance=severance)
    identities = [Identity.own()] * 2
    return SharedFabric(
        0, Control(2, whole), memory, identities, ranks=range(2), timeout_seconds=60.0
    )


def test_a_world_that_is_cut_is_left_within_a_tenth_of_a_second(
    monkeypatch: pytest.MonkeyPatch, waited: list[float]
) -> None:
    severance = Severance()
    severance.cut()
    looks: list[float] = []
    with pytest.raises(RankFailed, match="a rank of this run is lost"):
        fabric(monkeypatch, looks, severance).take(Signal.ARRIVE, 1)
    assert sum(waited) <= 0.1
    assert looks == []


def test_the_peer_is_looked_at_less_often_than_the_world(
    monkeypatch: pytest.MonkeyPatch, waited: list[float]
) -> None:
    looks: list[float] = []
    with pytest.raises(RankFailed, match="is dead"):
        fabric(monkeypatch, looks, Severance()).take(Signal.ARRIVE, 1)
    assert looks == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.06)
