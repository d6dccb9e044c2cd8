"""Losses whose numbers depend on which samples a batch has are seen; those of each are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.engine.masked_means import MaskedMeanCheck
from plait.engine.mixed_losses import MixedSamples

Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES = 3


def balanced(output: Tensor, targets: Tensor) -> Tensor:
    """Each sample weighs by the number of its class's samples in the batch."""
    weights = 1 / torch.bincount(targets, minlength=CLASSES).clamp(min=1)
    return (weights[targets] * F.cross_entropy(output, targets, reduction="none")).mean()


def adjusted(output: Tensor, targets: Tensor) -> Tensor:
    shares = torch.bincount(targets, minlength=CLASSES) / len(targets)
    return F.cross_entropy(output + (shares + 1e-3).log(), targets)


def by_a_weight_of_positives(output: Tensor, targets: Tensor) -> Tensor:
    truths = (targets > 0).float()
    weight = (1 - truths).sum() / truths.sum()
    return F.binary_cross_entropy_with_logits(output[:, 0], truths, pos_weight=weight)


def by_chosen_weights(output: Tensor, targets: Tensor) -> Tensor:
    """The balance of edges and background in holistically nested edge detection."""
    truths = (targets > 0).float()
    share = truths.sum() / truths.numel()
    weights = torch.where(truths > 0, 1 - share, share)
    return F.binary_cross_entropy_with_logits(output[:, 0], truths, weight=weights)


def by_written_weights(output: Tensor, targets: Tensor) -> Tensor:
    weights = (targets > 0).float()
    share = weights.mean()
    weights[targets > 0] = 1 - share
    return (weights * output.square().mean(1)).mean()


def apart(output: Tensor, targets: Tensor) -> Tensor:
    """The distance of two domains of a batch."""
    first, second = output[targets > 0], output[targets <= 0]
    return (first.mean(0) - second.mean(0)).pow(2).sum()


def invariant_to_scale(output: Tensor, targets: Tensor) -> Tensor:
    """The loss of depths that are known at some places."""
    error = (output[:, 0] - targets)[targets > 0]
    return error.square().mean() - 0.5 * error.mean() ** 2


CHOOSING = (
    *(balanced, adjusted, by_a_weight_of_positives, by_chosen_weights, by_written_weights),
    *(apart, invariant_to_scale),
)


def by_weights_of_classes(output: Tensor, targets: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0])[targets]
    chosen = torch.where(targets > 0, weights, 2 * weights)
    chosen[targets > 1] = 0.5
    return (chosen * F.cross_entropy(output, targets, reduction="none")).mean()


def of_chosen(output: Tensor, targets: Tensor) -> Tensor:
    chosen = targets > 0
    rows = F.normalize(output[chosen], dim=-1).softmax(-1).square().mean(1)
    return rows.sum() / len(output) + F.mse_loss(output[chosen] - 1, output[chosen] * 2)


def logged(output: Tensor, targets: Tensor) -> Tensor:
    counts = torch.bincount(targets, minlength=CLASSES)
    assert (counts[targets] > 0).all() and counts.sum() == len(targets)
    return F.cross_entropy(output, targets)


def over_counted(output: Tensor, targets: Tensor) -> Tensor:
    counts = torch.bincount(targets, minlength=CLASSES)
    return F.cross_entropy(output, targets, reduction="none").sum() / counts.sum()


OF_EACH = (by_weights_of_classes, of_chosen, logged, over_counted)


def found(loss: Loss) -> str:
    output = torch.randn(8, CLASSES, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 2, 0, 1, 1, 2])
    with MixedSamples(output, targets) as mixed:
        value = loss(output, targets)
    return mixed.found(value)


@pytest.mark.parametrize("loss", CHOOSING, ids=lambda loss: loss.__name__)
def test_a_number_of_the_batch_by_which_samples_count_is_seen(loss: Loss) -> None:
    assert found(loss)


@pytest.mark.parametrize("loss", OF_EACH, ids=lambda loss: loss.__name__)
def test_a_choice_of_samples_mixes_none(loss: Loss) -> None:
    assert not found(loss)


def contrast(similarities: Tensor) -> Tensor:
    own = torch.arange(len(similarities))
    return (F.cross_entropy(similarities, own) + F.cross_entropy(similarities.T, own)) / 2


def test_classes_that_are_the_samples_are_seen_where_the_model_compares() -> None:
    similarities = torch.randn(4, 4, requires_grad=True)
    with MixedSamples(similarities, torch.zeros(4)) as mixed:
        loss = contrast(2 * similarities)
    assert mixed.found(loss)


def test_as_many_classes_as_samples_are_not_taken_for_samples() -> None:
    logits, targets = torch.randn(4, 4, requires_grad=True), torch.arange(4)
    with MixedSamples(logits, targets) as mixed:
        loss = F.cross_entropy(logits, targets) + F.cross_entropy(logits, torch.zeros(4).long())
    assert not mixed.found(loss)


def test_a_mean_over_samples_that_a_prediction_chooses_is_told() -> None:
    def confident(output: Tensor, targets: Tensor) -> Tensor:
        chosen = output.softmax(-1).max(-1)[0] > 0.6
        return F.cross_entropy(output[chosen], targets[chosen])

    output = torch.tensor([[9.0, 0.0], [0.0, 0.1], [0.0, 8.0], [7.0, 0.0]], requires_grad=True)
    check = MaskedMeanCheck(confident, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(output, torch.tensor([0, 1, 1, 0]))
    assert ["a mean over a mask" in str(one.message) for one in caught] == [True]
