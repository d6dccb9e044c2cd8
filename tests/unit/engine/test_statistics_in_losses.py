"""Statistics over a batch are told in the forms in which losses have them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.mixed_losses import MixedSamples
from plait.engine.sample_sums import SampleSums

Loss = Callable[[Tensor, Tensor], Tensor]


def over_a_variance(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets) / (targets.var() + 1e-8)


def over_a_norm(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).norm() ** 2 / targets.norm() ** 2


def by_a_deviation(output: Tensor, targets: Tensor) -> Tensor:
    return (output * (targets * targets.std())).mean()


def decibels(output: Tensor, targets: Tensor) -> Tensor:
    return 10 * torch.log10(F.mse_loss(output, targets))


def bounded(output: Tensor, targets: Tensor) -> Tensor:
    return torch.tanh(F.mse_loss(output, targets))


def normalized(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(nn.BatchNorm1d(output.shape[1], affine=False)(output), targets)


def apart(output: Tensor, targets: Tensor) -> Tensor:
    return (output.mean(0) - targets.mean(0)).pow(2).sum()


def of_features(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean(0).sqrt().mean()


def covariances(output: Tensor, targets: Tensor) -> Tensor:
    return (torch.cov(output.T) - torch.cov(targets.T)).square().mean()


def distances(output: Tensor, targets: Tensor) -> Tensor:
    return -(torch.pdist(output) + 1e-8).log().mean()


def known_statistics(output: Tensor, targets: Tensor) -> Tensor:
    size = output.shape[1]
    return F.mse_loss(F.batch_norm(output, torch.zeros(size), torch.ones(size)), targets)


def means_of_features(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean(0).mean() + 0.1 * output.mean(0).sum()


def logged(output: Tensor, targets: Tensor) -> Tensor:
    loss = F.mse_loss(output, targets)
    assert loss / targets.var() >= 0 and output.detach().mean(0).square().sum() >= 0
    return loss


MIXED = (
    *(over_a_variance, over_a_norm, by_a_deviation, decibels, bounded, normalized),
    *(apart, of_features, covariances, distances),
)


@pytest.mark.parametrize("loss", MIXED, ids=lambda loss: loss.__name__)
def test_a_statistic_over_samples_is_seen(loss: Loss) -> None:
    output, targets = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3)
    with MixedSamples(output, targets) as mixed:
        value = loss(output, targets)
    assert mixed.found(value)


@pytest.mark.parametrize("loss", [known_statistics, means_of_features, logged])
def test_a_mean_of_features_is_not_taken_for_one(loss: Loss) -> None:
    output, targets = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3)
    with MixedSamples(output, targets) as mixed:
        value = loss(output, targets)
    assert not mixed.found(value)


def test_a_sum_that_leaves_out_what_is_no_number_is_a_sum() -> None:
    output, targets = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3)
    with SampleSums(output, targets) as sums:
        assert sums.has((output - targets).square().nansum())
