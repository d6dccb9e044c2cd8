"""The square of a norm is a sum over samples; a norm alone is told where a plan divides them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.engine.mixed_losses import MixedSamples
from plait.engine.sample_sums import SampleSums

Loss = Callable[[Tensor, Tensor], Tensor]


def squared(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).norm() ** 2


def by_square(output: Tensor, targets: Tensor) -> Tensor:
    return torch.linalg.norm(output - targets).square()


def by_pow(output: Tensor, targets: Tensor) -> Tensor:
    return torch.linalg.vector_norm(output - targets).pow(2)


def by_itself(output: Tensor, targets: Tensor) -> Tensor:
    distance = torch.dist(output, targets)
    return distance * distance


def absolute(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).norm(p=1)


def scaled(output: Tensor, targets: Tensor) -> Tensor:
    return (0.5 * (output - targets).norm(p="fro")) ** 2 / len(output)


def root(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets).sqrt() ** 2 + (F.mse_loss(output, targets) ** 0.5).square()


def of_each(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).norm(dim=1).mean() + F.normalize(output, dim=1).norm(2, -1).mean()


def alone(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).norm() / len(output)


def distance(output: Tensor, targets: Tensor) -> Tensor:
    return torch.dist(output, targets)


def beside(output: Tensor, targets: Tensor) -> Tensor:
    length = (output - targets).norm()
    return length**2 + length


def cubed(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).norm() ** 3


def of_another_order(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).norm(p=3) ** 2


def of_a_matrix(output: Tensor, targets: Tensor) -> Tensor:
    return torch.linalg.norm(output - targets, 1) + torch.linalg.norm(output - targets, 2) ** 2


def divisor(output: Tensor, targets: Tensor) -> Tensor:
    return (output / output.norm() * targets).mean()


def constant_divisor(output: Tensor, targets: Tensor) -> Tensor:
    return (output / output.norm().detach() * targets).mean()


def over_samples(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).norm(dim=0).mean()


def normalized(output: Tensor, targets: Tensor) -> Tensor:
    return (F.normalize(output, dim=0) * targets).mean()


SUMS = (squared, by_square, by_pow, by_itself, absolute)
MEANS = (scaled, root, of_each)
MIXED = (
    *(alone, distance, beside, cubed, of_another_order, of_a_matrix),
    *(divisor, constant_divisor, over_samples, normalized),
)


def seen(loss: Loss) -> tuple[bool, bool]:
    """Whether a loss mixes samples, and whether it is a sum over them."""
    output, targets = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    with SampleSums(output, targets) as sums, MixedSamples(output, targets) as mixed:
        value = loss(output, targets)
    return bool(mixed.found(value)), sums.has(value)


@pytest.mark.parametrize("loss", SUMS, ids=lambda loss: loss.__name__)
def test_the_square_of_a_norm_is_a_sum(loss: Loss) -> None:
    assert seen(loss) == (False, True)


@pytest.mark.parametrize("loss", MEANS, ids=lambda loss: loss.__name__)
def test_the_square_of_a_root_of_a_mean_is_a_mean(loss: Loss) -> None:
    assert seen(loss) == (False, False)


@pytest.mark.parametrize("loss", MIXED, ids=lambda loss: loss.__name__)
def test_other_norms_over_all_samples_mix_them(loss: Loss) -> None:
    assert seen(loss)[0]
