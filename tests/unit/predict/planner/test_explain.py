"""Each number and each word of an explanation against the estimates that it speaks of."""

from __future__ import annotations

import re

import pytest

from plait.plan import Plan
from plait.predict.cost.step import estimate_job
from plait.predict.planner.choose import decide
from plait.predict.planner.explain import explain_plan, losses, percent, times
from tests.unit.predict.cost.shapes import LLAMA_8B, config


@pytest.fixture(scope="module")
def choice():
    return decide(config(LLAMA_8B, 8192, 64), "h100x32")


def test_every_part_of_a_loss_is_a_difference_of_two_estimates(choice):
    best = choice.plans[0]
    told = losses(choice, best, 8)
    assert len(told) > 3 and [loss.slower for loss in told] == sorted(loss.slower for loss in told)
    for loss in told:
        assert (
            sum(part for _, part in loss.causes) - (loss.gain[1] if loss.gain else 0)
            <= 1.5 * abs(loss.slower) + 0.05
        )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (
            "tp16:1d,sp dp2:zero1 mb4 remat:full precision:bf16",
            "tensor-parallel communication over the node boundary",
        ),
        ("tp8:1d,sp precision:bf16 mb32", "computing on 8 of 32 devices"),
        ("dp32:zero3 mb2 precision:float32", "precision:float32"),
        ("dp32:zero3 mb2 remat:full precision:bf16", "recomputation (remat:full)"),
        ("dp32:zero1,offload mb2 precision:bf16", "updating on the host (offload)"),
    ],
)
def test_a_named_plan_loses_to_what_it_does_otherwise(choice, text, word):
    plan = Plan.parse(text)
    line = explain_plan(choice, plan)
    other = estimate_job(choice.job, plan, choice.machine)
    assert word in line
    said = float(re.search(r"loses ([\d.,]+)%", line)[1].replace(",", "")) / 100
    assert said == pytest.approx(other.step_seconds / choice.plans[0].step_seconds - 1, abs=0.006)
    assert ("times the memory" in line) == (not other.fits)


def test_the_first_choice_is_called_so(choice):
    assert explain_plan(choice, choice.plans[0].plan).endswith("is the first choice")


def test_numbers_for_people():
    assert [percent(one) for one in (0.004, 0.35, 101.0)] == ["0.4%", "35%", "10,100%"]
    assert [times(one) for one in (3.14, 41.2, 371.0)] == ["3.1", "41", "371"]
