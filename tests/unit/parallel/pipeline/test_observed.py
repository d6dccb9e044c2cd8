"""Costs, bubble and simulated step of a measured timeline: waits are no work, and a simulation is
its own measurement.
"""

from __future__ import annotations

import pytest

from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import Kind, Schedule, backward, forward, weight_grad
from plait.parallel.pipeline.lower import lower
from plait.parallel.pipeline.observed import (
    Messages,
    median_step,
    observed_action_costs,
    observed_bubble,
    observed_costs,
    simulated_step,
)
from plait.parallel.pipeline.schedules import make
from plait.parallel.pipeline.simulate import Costs, simulate
from plait.trace import CommEvent, Span, Timeline


def test_a_wait_is_not_the_cost_of_the_action_that_it_is_in() -> None:
    step = Timeline(origin_seconds=0.0)
    step.add(Span("0F0", "F", 0, 0.0, 1.0))
    step.add(Span("1F0", "F", 1, 0.0, 3.0))
    step.add(CommEvent("pp", "receive", 8, 0.0, 2.0, 1, exposed_seconds=2.0))
    assert observed_costs([step]) == {(Kind.FORWARD, 0): 1.0, (Kind.FORWARD, 1): 1.0}
    assert observed_bubble(step) == pytest.approx(1 - 2.0 / 6.0)


def test_costs_are_medians_over_micro_batches_and_steps() -> None:
    step = Timeline(origin_seconds=0.0)
    for index, seconds in enumerate((1.0, 5.0, 2.0)):
        step.add(Span(f"0B{index}", "B", 0, 10.0 * index, seconds))
    assert observed_costs([step])[Kind.BACKWARD, 0] == 2.0


def test_weight_gradients_that_the_last_of_them_makes_cost_their_mean() -> None:
    step = Timeline(origin_seconds=0.0)
    for index, seconds in enumerate((0.0, 0.0, 6.0)):
        step.add(Span(f"0W{index}", "W", 0, 10.0 * index, seconds))
    assert observed_costs([step])[Kind.WEIGHT_GRAD, 0] == 2.0


@pytest.mark.parametrize(
    ("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 1)]
)
def test_it_is_the_simulator_s_step_for_equal_costs(name: str, virtual: int) -> None:
    schedule = make(name, 3, 6, virtual)
    kinds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT_GRAD: 1.0, Kind.WEIGHT_GRAD: 1.0}
    costs = {
        (kind, stage): cost for kind, cost in kinds.items() for stage in range(schedule.num_stages)
    }
    step = simulated_step(lower(schedule), costs)
    expected = simulate(schedule, Costs())
    assert step.seconds == pytest.approx(expected.makespan_seconds)
    assert observed_bubble(step) == pytest.approx(expected.barrier_bubble_fraction)
    assert observed_costs([step]) == {
        key: cost for key, cost in costs.items() if any(key[0] is a.kind for a in schedule)
    }


def test_a_single_action_s_cost_goes_before_its_kind_s() -> None:
    """The last of two weight gradients makes both: whoever waited for the first would not wait any
    more.
    """
    steps = []
    for seconds in (5.0, 6.0, 9.0):
        step = Timeline(origin_seconds=0.0)
        step.add(Span("0W0", "W", 0, 0.0, 0.0))
        step.add(Span("0W1", "W", 0, 0.0, seconds))
        steps.append(step)
    own = observed_action_costs(steps)
    assert own == {weight_grad(0, 0): 0.0, weight_grad(0, 1): 6.0}
    schedule = make("zb-h1", 2, 2)
    costs = {
        (kind, stage): 1.0
        for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
        for stage in (0, 1)
    }
    spans = {span.name: span.seconds for span in simulated_step(schedule, costs, own=own).spans}
    assert (spans.get("0W0"), spans["0W1"], spans["1W0"]) == (None, 6.0, 1.0)


def test_messages_take_time_in_which_nobody_works() -> None:
    """Naive, two stages, one micro-batch: one message forth and one back, each under way for 2 and
    taken in 1.
    """
    schedule = lower(make("naive", 2, 1))
    costs = {(kind, stage): 1.0 for kind in (Kind.FORWARD, Kind.BACKWARD) for stage in (0, 1)}
    step = simulated_step(schedule, costs, Messages(transfer_seconds=2.0, taking_seconds=1.0))
    starts = {span.name: span.start_seconds for span in step.spans}
    assert starts == {"0F0": 0.0, "1F0": 4.0, "1B0": 5.0, "0B0": 9.0}
    assert [span.seconds for span in step.spans] == [1.0] * 4
    assert observed_bubble(step) == pytest.approx(1 - 4 / 20)


def test_a_message_that_has_long_been_there_must_still_be_taken() -> None:
    schedule = Schedule(
        "forwards", (0, 1), 2, ((forward(0, 0), forward(0, 1)), (forward(1, 0), forward(1, 1)))
    )
    costs = {(Kind.FORWARD, 0): 1.0, (Kind.FORWARD, 1): 5.0}
    step = simulated_step(schedule, costs, Messages(taking_seconds=0.5))
    assert {span.name: span.start_seconds for span in step.spans if span.rank == 1} == {
        "1F0": 1.5,
        "1F1": 7.0,
    }


def test_the_step_in_the_middle() -> None:
    steps = []
    for seconds in (3.0, 1.0, 2.0, 9.0):
        step = Timeline(origin_seconds=0.0)
        step.add(Span("0F0", "F", 0, 0.0, seconds))
        steps.append(step)
    assert median_step(steps).seconds == 2.0


def test_a_schedule_that_never_ends_is_an_error() -> None:
    stuck = Schedule(
        "stuck", (0, 1), 1, ((forward(0, 0), backward(0, 0)), (backward(1, 0), forward(1, 0)))
    )
    with pytest.raises(ScheduleError, match="never ends"):
        simulated_step(stuck, {})
