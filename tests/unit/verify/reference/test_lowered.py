from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from plait.verify import Recipe, judge, run_reference
from plait.verify.reference.lowered import LowPrecision, bounds
from plait.verify.reference.one_device import slicing_reasons
from tests.unit.verify.toy import Toy, batches, sgd, slices


class Half(nn.Module):
    """Only what `second` computes passes through float32."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(4, 6, dtype=torch.float64)
        self.second = nn.Linear(4, 2, dtype=torch.float64)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(inputs), self.second(inputs).float()


def floated(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A loss in float32."""
    return (output.float() - target.float()).square().sum(), torch.tensor(len(output))


def two(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    first, second = output
    return first.square().sum() + (second.double() - target).square().sum(), torch.tensor(
        len(target)
    )


def run(model, loss, **how):
    return run_reference(model, batches(), Recipe(loss, sgd), slices, **how)


def test_a_loss_in_float32_is_judged_in_float32():
    whole = run(Toy(), floated)
    by_slice = run(Toy(), floated, by_slice=True)
    assert not judge(by_slice, whole, tolerance=1e-10).ok
    limits = bounds(whole, functools.partial(run, Toy(), floated), torch.float64)
    assert judge(by_slice, whole, tolerance=1e-10, limits=limits).ok
    assert 1e-8 < max(limits.values()) < 1e-4


def test_a_wrong_factor_is_seen_through_the_rounding():
    whole = run(Toy(), floated)
    limits = bounds(whole, functools.partial(run, Toy(), floated), torch.float64)
    wrong = run(Toy(), lambda *pair: (floated(*pair)[0] * 1.0001, floated(*pair)[1]))
    kinds = {one.kind for one in judge(wrong, whole, tolerance=1e-10, limits=limits).failed}
    assert {"loss", "grad"} <= kinds


def test_numbers_that_no_float32_reaches_keep_their_tolerance():
    whole = run(Half(), two)
    limits = bounds(whole, functools.partial(run, Half(), two), torch.float64)
    names = {name for _, kind, name in limits if kind == "grad"}
    assert names == {"second.weight", "second.bias"}


def test_a_run_in_float64_has_no_other_limits():
    whole = run(Toy(), lambda output, target: (output - target).square().mean())
    again = functools.partial(run, Toy(), lambda output, target: (output - target).square().mean())
    assert bounds(whole, again, torch.float64) == {}


@pytest.mark.parametrize("constant", [torch.ones(1), torch.arange(3).float()])
def test_constants_are_exact(constant):
    """A table of angles in float32 is alike in every run."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with LowPrecision(torch.float64) as watch:
        (weight * (constant * 2).double()).sum().backward()
    assert watch.found == set()


def test_samples_do_not_depend_on_each_other_because_of_rounding():
    class Float(Toy):
        def forward(self, inputs: Tensor) -> Tensor:
            wide = super().forward(inputs).float()
            return (wide * (1 + 1e-6 * len(inputs))).double()

    assert slicing_reasons(Float(), batches(1)[0]) == []
