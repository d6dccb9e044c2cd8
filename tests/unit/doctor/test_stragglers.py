"""Stragglers by records: steps of a rank against those of its equals."""

from __future__ import annotations

import dataclasses

import pytest

from plait.doctor.flight import FlightRecorder
from plait.doctor.record import RankSnapshot, StepTimes, own_view
from plait.doctor.stragglers import slowness

FAST = StepTimes(1, 0.0, 0.1, 0.005, 0.06, 0.001, 0.0, 0.0)
SLOW = {
    "computing": dataclasses.replace(FAST, wait=0.001),
    "loader": dataclasses.replace(FAST, load=0.06, wait=0.005),
    "link": dataclasses.replace(FAST, issue=0.06, wait=0.001),
    "memory": dataclasses.replace(FAST, wait=0.001, minor_faults=20_000.0),
}


def view(rank: int, step: StepTimes) -> RankSnapshot:
    made = own_view(FlightRecorder(rank, 3))
    made.equals = (0, 1, 2)
    made.__dict__["steps"] = tuple(
        dataclasses.replace(step, step=number) for number in range(1, 21)
    )
    return made


@pytest.mark.parametrize("cause", SLOW)
def test_a_slow_rank_is_named_with_its_cause(cause: str) -> None:
    known = {0: view(0, FAST), 1: view(1, SLOW[cause]), 2: view(2, FAST)}
    finding = slowness(known[1], known)
    assert finding is not None
    assert (finding.kind, finding.rank, finding.step) == ("straggler", 1, 20)
    assert finding.cause.startswith(f"{cause}:")
    assert slowness(known[0], known) is None


def test_time_without_a_processor_is_no_fault_of_the_rank() -> None:
    known = {0: view(0, FAST), 1: view(1, SLOW["computing"]), 2: view(2, FAST)}
    assert slowness(known[1], known, delay_share=0.6) is None


def test_a_single_slow_step_is_no_straggler() -> None:
    known = {0: view(0, FAST), 1: view(1, FAST)}
    known[1].__dict__["steps"] = (*known[1].steps[:-1], SLOW["computing"])
    assert slowness(known[1], known) is None
