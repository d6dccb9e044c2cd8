"""Signs that rounding decides: an element may lie between both ends of its update."""

from __future__ import annotations

import pytest
import torch
from benchmarks.verify.steps import drawn, functions
from torch import Tensor, nn

from plait.verify.external import judge
from plait.verify.outside.source import FunctionSource
from plait.verify.outside.task import Trial
from plait.verify.outside.trial import alone
from plait.verify.record.observation import Observation, Record
from plait.verify.reference.one_device import run_reference
from plait.verify.reference.recipe import Recipe
from plait.verify.reference.rounding import RoundingBounds, bounds
from plait.verify.reference.signs import beyond_the_ends

RATE = 0.005
LIMIT = 0.1  # of the largest weight, which is `RATE` here: a tenth of an update
GRADS = ([-7e-5, 0.5, -0.2, 0.3], [0.1, 0.5, -0.2, 0.3])
WAYS = (9e-4, 1e-2)


def adamw(params):
    return torch.optim.AdamW(params, lr=RATE, eps=1e-5, weight_decay=0.0, foreach=False)


def sgd(params):
    return torch.optim.SGD(params, lr=RATE, foreach=False)


def run(make, *grads: list[float]) -> Record:
    """A weight that starts at zero and follows these gradients, in bf16."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = make([weight])
    start = {"weight": weight.detach().clone()}
    steps = []
    for one in grads:
        weight.grad = torch.tensor(one, dtype=torch.bfloat16)
        optimizer.step()
        grad = {"weight": weight.grad.clone()}
        steps.append(Observation(1.0, grad, {"weight": weight.detach().clone()}))
    return Record(start, steps)


def moved(record: Record, step: int, element: int, by: float) -> Record:
    """A copy in which an element of the weight lies elsewhere after one step."""
    steps = list(record.steps)
    value = steps[step].params["weight"].clone()
    value[element] += by
    steps[step] = Observation(1.0, steps[step].grads, {"weight": value})
    return Record(record.start, steps)


def remaining(parallel: Record, truth: Record, make, ways: bool = True) -> dict[int, float]:
    """The errors that remain, by step."""
    far: dict[tuple[int, str], Tensor] = {}
    if ways:
        far = {(step, "weight"): torch.full((4,), way) for step, way in enumerate(WAYS)}
    limits = {(step, "param", "weight"): LIMIT for step in range(len(truth.steps))}
    found = RoundingBounds(limits, 1e-3, far)
    recipe = Recipe(lambda output, target: output, make)
    errors = beyond_the_ends(parallel, truth, recipe, found)
    return {step: error for (step, _, _), error in errors.items()}


def test_an_update_that_turned_with_the_sign_is_explained_in_this_step_and_later_ones() -> None:
    truth = run(adamw, *GRADS)
    turned = run(adamw, [1e-5, *GRADS[0][1:]], GRADS[1])
    found = remaining(turned, truth, adamw)
    assert set(found) == {0, 1}
    assert max(found.values()) <= LIMIT
    assert remaining(turned, truth, adamw, ways=False) == {}


@pytest.mark.parametrize("element", [1, 2, 3])
def test_an_element_whose_sign_is_sure_is_not_explained(element: int) -> None:
    truth = run(adamw, *GRADS)
    wrong = moved(truth, 0, element, RATE)
    assert remaining(wrong, truth, adamw)[0] == pytest.approx(1.0, rel=0.02)


def test_what_lies_beyond_the_ends_remains() -> None:
    truth = run(adamw, *GRADS)
    far = remaining(moved(truth, 0, 0, -4 * RATE), truth, adamw)[0]  # the far end is at -2 updates
    assert far == pytest.approx(4 - 1.9, rel=0.1)
    other_way = remaining(moved(truth, 0, 0, RATE), truth, adamw)[0]  # the near end is at + 0.1
    assert other_way == pytest.approx(0.9, rel=0.1)


def test_an_optimizer_that_does_not_go_by_the_sign_explains_nothing() -> None:
    truth = run(sgd, *GRADS)
    wrong = moved(truth, 0, 0, 0.2 * RATE)
    without = remaining(wrong, truth, sgd)[0]
    assert without == pytest.approx(0.4, rel=0.02)


def test_the_report_has_what_remains() -> None:
    truth = run(adamw, *GRADS)
    turned = run(adamw, [1e-5, *GRADS[0][1:]], GRADS[1])
    key = (0, "param", "weight")
    report = judge(turned, truth, limits={key: LIMIT}, errors={key: 0.03})
    (one,) = [one for one in report.differences if one.key == key]
    assert one.error == 0.03 and one not in report.failed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_have_ways_below_float32_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    batch = torch.randn(4, 3).to(dtype), torch.randn(4, 2).to(dtype)
    recipe = Recipe(nn.functional.mse_loss, adamw)

    def rerun(how, start, data, in_slices):
        return run_reference(start, data, how)

    truth = run_reference(model, [batch], recipe)
    found = bounds(truth, rerun, recipe, model, [batch], dtype=dtype)
    assert bool(found.ways) == (dtype in (torch.bfloat16, torch.float16))


def test_a_right_step_whose_bias_turns_with_the_sign_of_its_gradient_is_right() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, sums have another order, and no sign turns
    try:
        report = alone(functions(drawn(1027)), Trial(FunctionSource(), 1, "bf16"))
    finally:
        torch.set_num_threads(threads)
    assert report.ok, report.text()
