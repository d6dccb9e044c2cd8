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


def matched_features(output: Tensor, targets: Tensor) -> Tensor:
    return F.l1_loss(output.mean(0), targets.mean(0))


def matched_squares(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output.mean(0), targets.mean(0))


def absolute(output: Tensor, targets: Tensor) -> Tensor:
    return (output.mean(0) - targets.mean(0)).abs().sum()


def free_bits(output: Tensor, targets: Tensor) -> Tensor:
    return torch.clamp((output - targets).square().mean(0), min=0.5).sum()


def limited(output: Tensor, targets: Tensor) -> Tensor:
    return output.mean(0).clamp(min=0.1).sum()


def flooded(output: Tensor, targets: Tensor) -> Tensor:
    return (F.mse_loss(output, targets) - 0.1).abs() + 0.1


def above_a_level(output: Tensor, targets: Tensor) -> Tensor:
    return F.relu(F.mse_loss(output, targets) - 0.1)


def larger(output: Tensor, targets: Tensor) -> Tensor:
    return torch.maximum(F.mse_loss(output, targets), output.square().mean())


def larger_of_a_stack(output: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(output, targets), output.square().mean()]).max()


def bent(output: Tensor, targets: Tensor) -> Tensor:
    loss = F.mse_loss(output, targets)
    return torch.where(loss > 1, loss, 0.5 * loss)


def limits_of_each(output: Tensor, targets: Tensor) -> Tensor:
    rows = (output - targets).square().mean(1)
    hinges = F.relu(1 - (output[:, 0] - output[:, 1])) + rows.clamp(max=2)
    larger_rows = torch.maximum(rows, hinges) + torch.where(rows > 1, rows, 0.5 * rows)
    return larger_rows.mean() + (output - targets).abs().clamp(min=0.1).mean()


def entries(output: Tensor, targets: Tensor) -> Tensor:
    rows = (output - targets).square().mean(1)
    taken = [rows[place].abs() + F.relu(output.T[0, place]) for place in range(len(rows))]
    return torch.stack(taken).mean()


def limited_counts(output: Tensor, targets: Tensor) -> Tensor:
    mask = (targets > 0).float()
    loss = ((output - targets).square() * mask).sum() / mask.sum().clamp(min=1)
    assert (loss > 1e6).logical_not()
    return torch.where(mask.sum() > 0, loss, loss * 0)


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
    *(matched_features, matched_squares, absolute, free_bits, limited),
    *(flooded, above_a_level, larger, larger_of_a_stack, bent),
)


@pytest.mark.parametrize("loss", MIXED, ids=lambda loss: loss.__name__)
def test_a_statistic_over_samples_is_seen(loss: Loss) -> None:
    output, targets = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3)
    with MixedSamples(output, targets) as mixed:
        value = loss(output, targets)
    assert mixed.found(value)


OF_EACH = (*(known_statistics, means_of_features, logged, limits_of_each, entries, limited_counts),)


def test_a_mean_of_two_heads_is_not_one_of_two_samples() -> None:
    output, targets = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    with MixedSamples(output, targets) as mixed:
        heads = torch.stack([output, 2 * output]).mean(0)
        loss = F.mse_loss(heads, targets) + heads.abs().mean()
    assert not mixed.found(loss)


@pytest.mark.parametrize("loss", OF_EACH, ids=lambda loss: loss.__name__)
def test_a_mean_of_features_is_not_taken_for_one(loss: Loss) -> None:
    output, targets = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3)
    with MixedSamples(output, targets) as mixed:
        value = loss(output, targets)
    assert not mixed.found(value)


def test_a_sum_that_leaves_out_what_is_no_number_is_a_sum() -> None:
    output, targets = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3)
    with SampleSums(output, targets) as sums:
        assert sums.has((output - targets).square().nansum())
