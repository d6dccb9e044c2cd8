"""Where a step goes: parts that add up, means over steps and ranks."""

from __future__ import annotations

import pytest

from plait.trace import CommEvent, Span, Timeline
from plait.trace.breakdown import TimeBreakdown, mean, of_steps


def timeline(waiting: float) -> Timeline:
    made = Timeline(0)
    made.add(Span("0F0", "F", 0, 0.0, 1.0))
    made.add(Span("0B0", "B", 0, 1.5, 2.0))
    made.add(CommEvent("pp", "receive", 8, 1.5, 1.0, 0, waiting))
    made.add(CommEvent("dp", "all_reduce", 8, 3.5, 0.25, 0, 0.25))
    return made


def test_computing_waiting_and_the_rest_add_up_to_the_step() -> None:
    found = of_steps([(timeline(1.0), 4.0)])
    assert found.compute_seconds == pytest.approx(2.0)  # 3 s in actions, 1 of them waiting
    assert found.waiting_seconds == {"pp": 1.0, "dp": 0.25}
    assert found.other_seconds == pytest.approx(0.75)
    assert found.bubble_fraction == pytest.approx(0.25)


def test_means_over_steps_and_ranks_and_nothing() -> None:
    found = of_steps([(timeline(1.0), 4.0), (timeline(0.0), 4.0)])
    assert found.waiting_seconds == {"dp": 0.25, "pp": 0.5}
    assert mean([found, TimeBreakdown(0.0, 0.0, {"tp": 1.0})]).waiting_seconds == {
        "dp": 0.125,
        "pp": 0.25,
        "tp": 0.5,
    }
    assert mean([]) == TimeBreakdown()
    assert TimeBreakdown().bubble_fraction == 0.0
    assert set(found.as_dict()) == {
        "step_seconds",
        "compute_seconds",
        "waiting_seconds",
        "other_seconds",
    }
