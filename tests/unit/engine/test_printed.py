"""What a user prints while training: an engine and the result of a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import plait
from plait.engine.step import Outcome, StepResult, void_result
from plait.trace import Timeline


def test_an_engine_and_a_result_say_what_they_are() -> None:
    engine = plait.build(
        torch.nn.Linear(3, 1), "dp1 mb2", loss=F.mse_loss, optimizer=torch.optim.SGD
    )
    assert repr(engine) == "Engine(Linear, 'mb2', rank 0 of 1, 0 steps)"
    result = engine.step((torch.ones(4, 3), torch.ones(4, 1)))
    assert repr(engine) == "Engine(Linear, 'mb2', rank 0 of 1, 1 steps)"
    said = f"loss={result.loss:.6g}, grad_norm={result.grad_norm:.6g}, tokens=4, seconds="
    assert said in str(result)
    assert "object at" not in str(result)
    engine.world.close()


def test_a_step_that_was_not_made_is_skipped() -> None:
    assert "loss=nan" in repr(void_result(Timeline(0), 0.0))
    assert repr(void_result(Timeline(0), 0.0)).endswith(", skipped)")


def test_the_numbers_of_a_device_are_not_awaited() -> None:
    def look() -> None:
        raise AssertionError("a print waited for the device")

    made = void_result(Timeline(0), 0.5)
    outcome: Any = Outcome(look)
    result = StepResult(outcome, made.seconds, made.timeline, made.ledger)
    assert repr(result) == "StepResult(under way, seconds=0.5)"
