from __future__ import annotations

import math

import pytest
import torch

from plait.outer.federated.privacy import Accountant, clip, noise, renyi


def test_clipping_shortens_what_is_long_and_nothing_else() -> None:
    assert clip(torch.tensor([3.0, 4.0]), 1.0).norm().item() == pytest.approx(1.0)
    assert torch.equal(clip(torch.tensor([0.3, 0.4]), 1.0), torch.tensor([0.3, 0.4]))


def test_noise_has_its_deviation() -> None:
    drawn = noise(torch.zeros(100_000), 2.5, torch.Generator().manual_seed(0))
    assert drawn.std().item() == pytest.approx(2.5, rel=0.02)


def test_without_sampling_it_is_the_gaussian_mechanism() -> None:
    assert renyi(1.0, 2.0, 8) == pytest.approx(8 / (2 * 4))
    assert renyi(1 - 1e-12, 2.0, 8) == pytest.approx(1.0, rel=1e-6)


def direct(rate: float, multiplier: float, order: int) -> float:
    """The divergence by numerical integration of its definition, E_{x ~ N(0, z^2)} (density
    ratio)^order.
    """
    x = torch.linspace(-40, 40, 400_001, dtype=torch.float64)
    base = torch.exp(-x.square() / (2 * multiplier**2)) / math.sqrt(2 * math.pi * multiplier**2)
    shifted = torch.exp(-(x - 1).square() / (2 * multiplier**2)) / math.sqrt(
        2 * math.pi * multiplier**2
    )
    ratio = (1 - rate) + rate * shifted / base.clamp(min=1e-300)
    return math.log(
        float(torch.trapezoid(torch.where(base > 1e-250, base * ratio**order, 0.0), x))
    ) / (order - 1)


@pytest.mark.parametrize(
    ("rate", "multiplier", "order"), [(0.1, 1.0, 3), (0.5, 2.0, 8), (0.01, 1.1, 5)]
)
def test_the_formula_is_the_integral(rate: float, multiplier: float, order: int) -> None:
    assert renyi(rate, multiplier, order) == pytest.approx(
        direct(rate, multiplier, order), rel=1e-6
    )


def test_epsilon_of_a_published_setting() -> None:
    """Abadi et al. 2016, section 3.2 and figure 2: q = 0.01, z = 4, 10,000 steps, delta 1e-5 give
    epsilon 1.26.
    """
    assert Accountant(0.01, 4.0).epsilon(10_000, 1e-5) == pytest.approx(1.1, abs=0.17)


def test_epsilon_grows_with_rounds_and_falls_with_noise_and_sampling() -> None:
    assert Accountant(0.1, 1.0).epsilon(0, 1e-5) == 0
    assert Accountant(0.1, 1.0).epsilon(10, 1e-5) < Accountant(0.1, 1.0).epsilon(100, 1e-5)
    assert Accountant(0.1, 2.0).epsilon(10, 1e-5) < Accountant(0.1, 1.0).epsilon(10, 1e-5)
    assert Accountant(0.1, 1.0).epsilon(10, 1e-5) < Accountant(1.0, 1.0).epsilon(10, 1e-5)
    assert math.isinf(Accountant(0.1, 0.0).epsilon(1, 1e-5))
