"""Stragglers by records: steps of a rank against those of its equals."""

from __future__ import annotations

import dataclasses
import time

import pytest

from plait.doctor.flight import FlightRecorder, Phase
from plait.doctor.record import RankSnapshot, StepTimes, own_view
from plait.doctor.stragglers import delay_share, slowness

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
    assert slowness(known[1], known, own_share=0.6) is None


def test_who_hands_over_to_a_rank_without_a_processor_is_no_straggler() -> None:
    known = {0: view(0, FAST), 1: view(1, SLOW["link"]), 2: view(2, FAST)}
    assert slowness(known[1], known, 0.1, 0.1) is not None
    assert slowness(known[1], known, 0.1, 0.6) is None


def test_the_delay_is_that_of_the_steps_that_are_compared() -> None:
    """12 steps of 0.1 s, the last of which ended at 10 s."""
    step = dataclasses.replace(FAST, ended=10.0)
    known = view(0, step)
    known.__dict__["steps"] = tuple(
        dataclasses.replace(step, ended=10.0 - 0.1 * (11 - number)) for number in range(12)
    )
    assert delay_share([(9.0, 4.0), (10.0, 4.5)], known) is None
    assert delay_share([(6.0, 1.0), (8.0, 2.0), (10.0, 3.0)], known) == pytest.approx(0.5)
    assert delay_share([(8.0, 2.0), (10.0, 1.0)], known) == 0.0  # threads have ended


def test_more_work_is_seen_where_processors_are_short() -> None:
    """A rank that computes more is named even if most of its time it had no processor."""
    working = dataclasses.replace(SLOW["computing"], processor=0.03)
    waiting = dataclasses.replace(FAST, processor=0.01)
    known = {0: view(0, waiting), 1: view(1, working), 2: view(2, waiting)}
    finding = slowness(known[1], known, own_share=0.9)
    assert finding is not None and finding.cause.startswith("computing:")
    alike = dataclasses.replace(SLOW["computing"], processor=0.011)
    known[1] = view(1, alike)
    assert slowness(known[1], known, own_share=0.9) is None


def test_a_step_tells_its_processor_time() -> None:
    flight = FlightRecorder(0, 1)
    flight.enter(Phase.STEPPING)
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    flight.step_done(1)
    (step,) = own_view(flight).steps
    assert step.processor >= 0.02


def test_a_single_slow_step_is_no_straggler() -> None:
    known = {0: view(0, FAST), 1: view(1, FAST)}
    known[1].__dict__["steps"] = (*known[1].steps[:-1], SLOW["computing"])
    assert slowness(known[1], known) is None
