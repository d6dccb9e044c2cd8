"""Processes that get nowhere before the doctor's records begin."""

from __future__ import annotations

import pytest

from plait.doctor.process import Usage
from plait.launcher import stalled
from plait.launcher.stalled import Stalled

BUSY, IDLE, STOPPED = 11, 12, 13


class System:
    """The clock, and what the system says of three processes: one computes, two do not."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds

    def usage(self, pid: int) -> Usage:
        return Usage(self.seconds if pid == BUSY else 0.0, 0, 0, 0.0)

    def state(self, pid: int) -> str:
        return "T" if pid == STOPPED else "S"


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    found = System()
    monkeypatch.setattr(stalled.time, "monotonic", found.monotonic)
    monkeypatch.setattr(stalled.process, "usage", found.usage)
    monkeypatch.setattr(stalled.process, "state", found.state)
    return found


def ended(system: System, looks: int, loading: set[int], joining: set[int]) -> dict[int, str]:
    """What is to be ended after so many seconds."""
    watch = Stalled(8.0)
    found: dict[int, str] = {}
    for _ in range(looks):
        system.seconds += 1.0
        found.update(watch.look(loading, joining))
    return found


def test_a_stopped_process_is_lost_after_the_seconds_of_a_hang(system: System) -> None:
    everyone = {BUSY, IDLE, STOPPED}
    assert ended(system, 8, everyone, set()) == {}
    assert list(ended(system, 9, everyone, set())) == [STOPPED]
    assert "stopped it for 8 s" in ended(system, 9, set(), everyone)[STOPPED]


def test_a_process_that_does_nothing_is_lost_while_it_loads_alone(system: System) -> None:
    assert list(ended(system, 70, {BUSY, IDLE}, set())) == [IDLE]
    assert ended(system, 70, {BUSY}, {IDLE}) == {}  # it may wait for others


def test_a_launcher_that_was_stopped_with_its_ranks_ends_none(system: System) -> None:
    watch = Stalled(8.0)
    watch.look({STOPPED}, set())
    system.seconds += 3600.0
    assert watch.look({STOPPED}, set()) == {}
