from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from plait.verify import Observation, RankView, Record, judge
from plait.verify.record.compare import (
    Difference,
    differences,
    refusals,
    relative_error,
    update_error,
)
from tests.unit.verify.toy import altered, clone, reference


def test_a_run_equals_a_copy_of_itself():
    record = reference()
    report = judge(altered(record), record)
    assert report.ok, report.text()
    assert report.as_dict()["grad_error"] == 0.0
    assert report.worst is not None and report.findings == []


def test_what_passes_is_reported_at_its_own_tolerance():
    record = reference()
    report = judge(altered(record), record)
    limit = 100 * report.tolerance
    coarse = replace(report, tolerance=limit, differences=(Difference(0, "loss", "", limit / 2),))
    whole = replace(report, parts=(coarse,))
    assert whole.ok and whole.worst is not None and whole.worst.error <= report.tolerance
    failing = replace(coarse, differences=(Difference(0, "loss", "", limit * 2),))
    assert replace(report, parts=(failing,)).worst == failing.differences[0]


def test_relative_error_is_of_the_tensor_and_not_of_the_element():
    truth = torch.tensor([1e-3, 10.0], dtype=torch.float64)
    assert relative_error(truth + torch.tensor([1e-9, 0.0]), truth) == pytest.approx(1e-10)


def test_rounding_noise_of_a_zero_gradient_is_judged_by_the_model():
    noise = torch.tensor([1e-18], dtype=torch.float64)
    assert relative_error(noise, torch.zeros(1, dtype=torch.float64), scale=1.0) < 1e-10
    assert relative_error(noise, torch.zeros(1, dtype=torch.float64)) == math.inf


def test_a_parameter_without_elements_may_be_on_one_side_alone():
    for values, error in ((torch.ones(0, 3), 0.0), (torch.ones(1), math.inf)):
        truth = replace(reference(), start={"extra": values})
        found = next(differences(replace(truth, start={}), truth))
        assert found.name == "extra" and found.error == error


def test_what_cannot_be_compared_is_infinitely_far():
    one = torch.ones(2)
    assert relative_error(one, torch.ones(3)) == math.inf
    assert relative_error(one * math.nan, one) == math.inf
    assert relative_error(None, one) == 1.0
    assert relative_error(None, None) == 0.0


def test_update_error_sees_a_step_size_that_large_weights_hide():
    before = {"w": torch.full((3,), 1000.0, dtype=torch.float64)}
    truth = {"w": before["w"] + 1e-3}
    mine = {"w": before["w"] + 2e-3}
    assert relative_error(mine["w"], truth["w"]) < 1e-5
    assert update_error(mine, truth, before) == pytest.approx(1.0, rel=1e-6)


def refused(parallel, record):
    report = judge(parallel, record)
    assert not report.ok
    return " ".join(report.refusals)


def test_refuses_dead_gradients():
    record = altered(reference(), grads={"w": torch.zeros(2), "b": None})
    assert "two dead models agree" in refused(altered(record), record)


def test_refuses_weights_that_did_not_move():
    record = reference()
    still = altered(record, params=clone(record.start))
    assert "no weight" in refused(altered(still), still)


def test_refuses_a_tensor_compared_with_itself():
    record = reference()
    assert "compared with itself" in refused(record, record)


def test_refuses_views_of_live_parameters():
    live = reference().steps[1].params
    record = Record(
        None,
        [
            Observation(1.0, {"w": torch.ones(1)}, live),
            Observation(0.5, {"w": torch.ones(1)}, live),
        ],
    )
    assert "observe clones" in refused(altered(reference()), record)


def test_refuses_nan_and_nothing():
    record = reference()
    assert "NaN" in refused(
        altered(record, grads={**record.steps[0].grads, "first.bias": torch.full((6,), math.nan)}),
        record,
    )
    assert "the loss" in refused(altered(record, loss=math.nan), record)
    assert refusals(Record(None, []), Record(None, [])) == ["no step was observed"]
    empty = Record(None, [Observation(1.0, {}, {})])
    assert "no parameters" in refused(empty, empty)
    assert "steps" in refused(Record(None, record.steps[:1]), record)


def test_a_parameter_that_only_one_side_has_fails():
    record = reference()
    params = clone(record.steps[0].params)
    del params["second.bias"]
    assert not judge(altered(record, params=params), record).ok


def test_every_copy_counts():
    record = reference()
    wrong = clone(record.steps[0].params)
    wrong["first.weight"] += 1e-3
    report = judge(
        altered(
            record,
            ranks={0: RankView(params=clone(record.steps[0].params)), 1: RankView(params=wrong)},
        ),
        record,
    )
    assert not report.ok and report.failed[0].kind == "replica"
    assert "ranks 0, 1" in report.findings[0].text


def test_text_and_record_say_the_same():
    record = reference()
    report = judge(altered(record, loss=record.steps[0].loss * 2), record, plan="dp2")
    found = report.as_dict()
    assert {
        "ok",
        "loss_error",
        "grad_error",
        "param_error",
        "worst",
        "plan",
        "world_size",
        "steps",
    } <= found.keys()
    assert found["loss_error"] == pytest.approx(1.0) and found["worst"]["kind"] == "loss"
    assert report.text().startswith("dp2: NOT equal to one device")
