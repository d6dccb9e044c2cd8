"""Bounds by perturbation: a right step of a low precision passes, and a small fault does not."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from benchmarks.verify.steps import FAULTS, drawn, faulty, functions
from torch import nn

from plait.models.parameters import Parameters
from plait.verify import Report
from plait.verify.outside.source import FunctionSource
from plait.verify.outside.task import Trial
from plait.verify.outside.trial import alone
from plait.verify.record.observation import Observation, Record
from plait.verify.reference.recipe import Recipe
from plait.verify.reference.rounding import OtherSums, least_scale, scale_error
from plait.verify.reference.underflow import Underflow, at_the_end


def judged(cell, dtype: str) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return alone(functions(cell), Trial(FunctionSource(), 2, dtype))


def small(cell):
    return replace(cell, family="perceptron", depth=1)


@pytest.mark.parametrize("dtype", ["float32", "bf16", "float16"])
def test_a_right_step_passes_and_a_wrong_one_does_not(dtype: str) -> None:
    right = judged(small(drawn(3)), dtype)
    assert right.ok, right.text()
    assert right.tolerance < 1e-2
    assert "times what the last place does to one device" in right.notes[-1]
    for name in ("one parameter does not move", "no sum over ranks"):
        assert not judged(small(faulty(name, 3)), dtype).ok


@pytest.mark.parametrize("number", [91, 127, 192, 198])
def test_a_square_that_underflows_in_one_run_only_is_no_fault(number: int) -> None:
    right = judged(drawn(number), "float16")
    assert right.ok, right.text()


def test_gradients_move_only_where_a_state_below_the_normal_numbers_jumps() -> None:
    def record(*grads: float) -> Record:
        grad = torch.tensor(grads, dtype=torch.float16)
        weight = {"weight": torch.zeros(3, dtype=torch.float16)}
        return Record(weight, [Observation(0.0, {"weight": grad}, weight)])

    def make(params):
        return torch.optim.Adam(params, eps=1e-3, foreach=False)

    recipe = Recipe(lambda output, target: output, make)
    underflow = Underflow(record(-0.00545, 0.004, 1.0), torch.float16)
    underflow.add(record(-0.00546, 0.00401, 1.01))
    ways = underflow.jumps(recipe, 4.0)
    assert ways[0, "weight"][0] == pytest.approx(5e-5, rel=0.5)
    assert not ways[0, "weight"][1:].any()
    sizes = []
    for up in (True, False):
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        optimizer = at_the_end(recipe, ways, up).optimizer(Parameters([("weight", parameter)]))
        parameter.grad = torch.tensor([-0.00545, 0.004, 1.0], dtype=torch.float16)
        optimizer.step()
        sizes.append(float(parameter[0].detach()))
    assert 0 < 5 * sizes[0] < sizes[1]


def test_a_parameter_that_stays_is_seen_beside_squares_that_underflow() -> None:
    report = judged(faulty("one parameter does not move", 1), "float16")
    assert "embed.weight" in {one.name for one in report.failed if one.kind == "update"}


def test_the_scale_of_all_gradients_shows_below_the_bound_of_each() -> None:
    cell = replace(faulty("gradients 10 % too large", 1), family="transformer", depth=1)
    report = judged(cell, "bf16")
    assert "scale" in {one.kind for one in report.failed}
    assert not any(one.cause == "module" for one in report.findings), report.text()


def test_every_fault_is_seen_in_float64() -> None:
    assert len(FAULTS) >= 25
    for name in ("gradients 1 % too large", "bias added by each rank", "moments lost"):
        assert not judged(small(faulty(name, 3)), "float64").ok


def test_sums_in_another_order_are_the_same_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(4, 7, dtype=torch.float64)
    second = torch.randn(7, 3, dtype=torch.float64)
    bias = torch.randn(3, dtype=torch.float64)
    with OtherSums(generator):
        product = torch.addmm(bias, first, second)
        total = first.sum(dim=1)
        several = torch.bmm(first[None], second[None])[0]
    assert torch.allclose(product, bias + first @ second, rtol=1e-13)
    assert not torch.equal(total, first.sum(dim=1)) or not torch.equal(several, first @ second)
    assert torch.allclose(total, first.sum(dim=1)) and torch.allclose(several, first @ second)


def test_a_scale_is_measured_and_rounding_bounds_it() -> None:
    truth = torch.randn(1000, dtype=torch.float64)
    assert scale_error(1.25 * truth, truth) == pytest.approx(0.25)
    wide = least_scale(truth, truth * 1e-3, torch.bfloat16)
    assert wide == pytest.approx(1000 * least_scale(truth, truth, torch.bfloat16))
