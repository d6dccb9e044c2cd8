"""A loss of the hardest or largest of a batch is told where a plan divides the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.mixed_losses import MixedSamples

Loss = Callable[[Tensor, Tensor], Tensor]
SHAPES = ((4, 8), (8, 8), (6, 3), (2, 4))


def losses_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets.argmax(1), reduction="none")


def hardest(output: Tensor, targets: Tensor) -> Tensor:
    return losses_of(output, targets).topk(2).values.mean()


def hardest_by_places(output: Tensor, targets: Tensor) -> Tensor:
    losses = losses_of(output, targets)
    return losses[torch.topk(losses.detach(), k=1, dim=0).indices].mean()


def hardest_of_sorted(output: Tensor, targets: Tensor) -> Tensor:
    return losses_of(output, targets).sort(descending=True)[0][:2].mean()


def hardest_places(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().view(-1).topk(3)[0].mean()


def above_a_quantile(output: Tensor, targets: Tensor) -> Tensor:
    losses = losses_of(output, targets)
    return losses[losses >= losses.detach().quantile(0.7)].mean()


def above_a_count(output: Tensor, targets: Tensor) -> Tensor:
    losses = losses_of(output, targets)
    return (losses * (losses >= losses.kthvalue(2).values.detach())).mean()


def median(output: Tensor, targets: Tensor) -> Tensor:
    return losses_of(output, targets).median()


def largest(output: Tensor, targets: Tensor) -> Tensor:
    return losses_of(output, targets).max()


def largest_of_features(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets) + 0.1 * output.amax(dim=0).mean()


def worst(output: Tensor, targets: Tensor) -> Tensor:
    losses = losses_of(output, targets)
    return losses[losses.argmax()]


def over_the_largest(output: Tensor, targets: Tensor) -> Tensor:
    return (output * (targets / targets.abs().max().clamp(min=1e-6))).mean()


def guessed_softmax(output: Tensor, targets: Tensor) -> Tensor:
    with pytest.warns(UserWarning, match="Implicit dimension"):
        weights = nn.Softmax(dim=None)(output[:, 0])
    return (weights * targets[:, 0]).sum()


def deviation(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets) - output.std()


def a_logarithm_and_the_largest(output: Tensor, targets: Tensor) -> Tensor:
    """The largest is added to a logarithm from which none was subtracted."""
    return (output.exp().sum(1).log() + output.max()).mean()


def hardest_of_each(output: Tensor, targets: Tensor) -> Tensor:
    apart = (output - targets).square()
    middle = apart.median(dim=1).values + torch.quantile(apart, 0.5, dim=1)
    ends = apart.max(1)[0] + apart.min(dim=-1).values + apart.amax(1) + apart.sort().values[:, 0]
    return (apart.topk(2)[0].mean(1) + apart.kthvalue(1)[0] + middle + ends).mean()


def larger_of_two(output: Tensor, targets: Tensor) -> Tensor:
    larger = torch.max(output, targets) + output.min(other=targets)
    return torch.maximum(larger, larger.abs()).mean()


def stable(output: Tensor, targets: Tensor) -> Tensor:
    shifted = (output - output.max()).exp() + (targets - targets.max(0).values).exp()
    largest_label = targets.argmax(1).max()
    chances = shifted / shifted.sum(1, keepdim=True)
    return -(chances.log() * (torch.arange(output.shape[1]) <= largest_label)).mean()


def stable_logarithm(output: Tensor, targets: Tensor) -> Tensor:
    largest = output.max()
    whole = (output - largest).exp().sum(1).log() + largest
    other = largest + torch.logsumexp(output - largest, 1)
    return (whole + other - 2 * output[:, 0]).mean()


def of_lengths(output: Tensor, targets: Tensor) -> Tensor:
    lengths: Any = targets.argmax(1) + 1
    mask = torch.arange(lengths.max())[None] < lengths[:, None]
    return ((output[:, : mask.shape[1]] * mask).sum(1) / mask.sum(1)).mean()


def largest_of_a_sample(output: Tensor, targets: Tensor) -> Tensor:
    pairs_of_rows = zip(output, targets, strict=True)
    return torch.stack([(one - other).topk(2)[0].max(0)[0] for one, other in pairs_of_rows]).mean()


OF_THE_BATCH = (
    *(hardest, hardest_by_places, hardest_of_sorted, hardest_places, above_a_quantile),
    *(above_a_count, median, largest, largest_of_features, worst, over_the_largest),
    *(guessed_softmax, deviation, a_logarithm_and_the_largest),
)
OF_EACH = (
    hardest_of_each,
    larger_of_two,
    stable,
    stable_logarithm,
    of_lengths,
    largest_of_a_sample,
)


def found(loss: Loss, shape: tuple[int, int]) -> str:
    output, targets = torch.randn(shape, requires_grad=True), torch.randn(shape)
    with MixedSamples(output, targets) as mixed:
        value = loss(output, targets)
    return mixed.found(value)


@pytest.mark.parametrize("loss", OF_THE_BATCH, ids=lambda loss: loss.__name__)
def test_a_choice_over_samples_is_seen(loss: Loss) -> None:
    assert all(found(loss, shape) for shape in SHAPES)


@pytest.mark.parametrize("loss", OF_EACH, ids=lambda loss: loss.__name__)
def test_a_choice_within_each_sample_is_not_taken_for_one(loss: Loss) -> None:
    assert not any(found(loss, shape) for shape in SHAPES)
