"""A sum of log probabilities or divergences of torch.distributions is told; a mean is not.

Distributions read the sizes of what they get, of which the loss knows nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Independent, Laplace, Normal, kl_divergence

from plait.engine.masked_means import MaskedMeanCheck

Loss = Callable[[Tensor, Tensor], Tensor]

SUMS: dict[str, Loss] = {
    "normal": lambda output, targets: -Normal(output, 1.0).log_prob(targets).sum(),
    "half": lambda output, targets: -0.5 * Laplace(output, 0.5).log_prob(targets).sum(),
    "independent": lambda output, targets: (
        -Independent(Normal(output, 1.0), 1).log_prob(targets).sum()
    ),
    "categorical": lambda output, targets: (
        -Categorical(logits=output).log_prob(targets.argmax(1)).sum()
    ),
    "bernoulli": lambda output, targets: (
        -Bernoulli(logits=output).log_prob(targets.gt(0).float()).sum()
    ),
    "divergence": lambda output, targets: (
        F.mse_loss(output, targets)
        + kl_divergence(Normal(output, output.exp()), Normal(0.0, 1.0)).sum()
    ),
    "divergence of classes": lambda output, targets: kl_divergence(
        Categorical(logits=output), Categorical(logits=targets)
    ).sum(),
    "square": lambda output, targets: ((output - targets) * (output - targets)).sum(),
}


def by_its_shape(output: Tensor, targets: Tensor) -> Tensor:
    made = Normal(output, 1.0)
    return -made.log_prob(targets).sum() / made.batch_shape[0]


def by_its_numbers(output: Tensor, targets: Tensor) -> Tensor:
    made = Normal(output, 1.0)
    return -(made.log_prob(targets) * (1 / made.batch_shape.numel())).sum()


def by_own_weights(output: Tensor, targets: Tensor) -> Tensor:
    weights = output[:, :1].detach().exp()
    return (weights / weights.sum() * (output - targets).square()).sum()


MEANS: dict[str, Loss] = {
    "mean": lambda output, targets: -Normal(output, 1.0).log_prob(targets).sum(-1).mean(),
    "over samples": lambda output, targets: (
        -Normal(output, 1.0).log_prob(targets).sum() / len(targets)
    ),
    "by its shape": by_its_shape,
    "by its numbers": by_its_numbers,
    "by own weights": by_own_weights,
}


def said(loss: Loss) -> list[str]:
    check = MaskedMeanCheck(loss, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(torch.randn(4, 3, requires_grad=True), torch.randn(4, 3))
    return [str(one.message) for one in caught if "it is a sum over them" in str(one.message)]


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_of_a_distribution_is_told(kind: str) -> None:
    assert len(said(SUMS[kind])) == 1


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_of_a_distribution_says_nothing(kind: str) -> None:
    assert said(MEANS[kind]) == []
