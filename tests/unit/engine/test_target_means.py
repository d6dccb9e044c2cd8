"""What a loss does with masked targets is looked at, and not the targets alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.masked_means import MaskedMeanCheck
from plait.values import PyTree

Loss = Callable[[Tensor, Any], Tensor]
CLASSES = 5
WEIGHTS = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]


def padded(lengths: list[int], mark: int) -> Tensor:
    """Classes [B, 6] from 1, of which each row keeps so many; the others are the mark."""
    places = torch.arange(6).expand(len(lengths), 6)
    return torch.where(places < torch.tensor(lengths)[:, None], 1 + places % 4, mark)


def said(loss: Loss, targets: PyTree, sequences: int = 1) -> list[str]:
    """The warnings of a look at a micro-batch of three samples."""
    check = MaskedMeanCheck(loss, 2, sequences)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(torch.randn(3, 6, CLASSES, requires_grad=True), targets)
    return [str(one.message) for one in caught]


def filled(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, labels.masked_fill(labels == 0, -100))


def chosen(output: Tensor, labels: Tensor) -> Tensor:
    wanted = torch.where(labels == 0, -100, labels)
    return F.cross_entropy(output.flatten(0, 1), wanted.flatten())


def written(output: Tensor, labels: Tensor) -> Tensor:
    wanted = labels.clone()
    wanted[labels == 0] = -100
    return F.cross_entropy(output.view(-1, CLASSES), wanted.view(-1))


def time_first(output: Tensor, labels: Tensor) -> Tensor:
    rows = output.transpose(0, 1).reshape(-1, CLASSES)
    return F.cross_entropy(rows, labels.t().reshape(-1), ignore_index=0)


@pytest.mark.parametrize("loss", [filled, chosen, written, time_first])
def test_a_mask_that_the_loss_makes_is_told(loss: Loss) -> None:
    """The targets have no masked class before; each part had a mean of its own."""
    (text,) = said(loss, padded([3, 5, 4], 0))
    assert "samples have 3 to 5 targets" in text
    assert said(loss, padded([4, 4, 4], 0)) == []
    assert len(said(loss, padded([4, 4, 4], 0), sequences=2)) == 1


def test_a_mask_that_the_targets_have_beside_the_classes_is_told() -> None:
    def loss(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output.mT, targets["labels"].where(targets["mask"], -100))

    labels, masks = torch.ones(3, 6, dtype=torch.int64), padded([3, 5, 4], 0) > 0
    (text,) = said(loss, {"labels": labels, "mask": masks})
    assert "samples have 3 to 5 targets that are not -100" in text


def logarithms(output: Tensor, labels: Tensor) -> Tensor:
    """The logarithm [B] of each sample's likelihood, as losses of preferences take it."""
    mask = labels != -100
    classes = labels.masked_fill(~mask, 0)[..., None]
    return (output.log_softmax(-1).gather(-1, classes)[..., 0] * mask).sum(-1)


def preferences(output: Tensor, labels: Tensor) -> Tensor:
    return -F.logsigmoid(0.1 * logarithms(output, labels)).mean()


def preferences_by_sums(output: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(output.mT, labels, reduction="none").sum(-1)
    return -F.logsigmoid(-0.1 * each).mean()


def means_of_sequences(output: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    losses = F.cross_entropy(output.mT, labels, reduction="none")
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def means_of_rows(output: Tensor, labels: Tensor) -> Tensor:
    losses = [F.cross_entropy(*pair) for pair in zip(output, labels, strict=True)]
    return torch.stack(losses).mean()


def over_all_places(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, labels, reduction="none").mean()


def with_a_penalty(output: Tensor, labels: Tensor) -> Tensor:
    penalty = sum(weight.pow(2).sum() for weight in WEIGHTS)
    return F.cross_entropy(output.mT, labels.clamp(min=0)) + 1e-4 * penalty


OF_EACH = (
    *(preferences, preferences_by_sums, means_of_sequences, means_of_rows, over_all_places),
    with_a_penalty,
)


@pytest.mark.parametrize("loss", OF_EACH, ids=lambda loss: loss.__name__)
def test_a_number_of_each_sample_says_nothing(loss: Loss) -> None:
    assert said(loss, padded([3, 5, 4], -100)) == []


class Hidden(torch.autograd.Function):
    """A mean over unmasked targets that function modes do not see, as fused ones are."""

    @staticmethod
    def forward(context: Any, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.mT, labels)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[None, None]:
        raise NotImplementedError


def hidden(output: Tensor, labels: Tensor) -> Tensor:
    return Hidden.apply(output, labels)


def hidden_beside_a_penalty(output: Tensor, labels: Tensor) -> Tensor:
    penalty = sum(weight.pow(2).sum() for weight in WEIGHTS)
    return F.cross_entropy(output.mT, labels.clamp(min=0)) + hidden(output, labels) + penalty


def hidden_beside_another(output: Tensor, labels: Tensor) -> Tensor:
    return hidden(output, labels) + (output.mean(-1) * labels).mean()


def operator(output: Tensor, labels: Tensor) -> Tensor:
    return torch.ops.aten.cross_entropy_loss(output.mT, labels)


def over_a_count_of_losses(output: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(output.mT, labels, reduction="none")
    return losses.sum() / losses.count_nonzero()


def at_places(output: Tensor, labels: Tensor) -> Tensor:
    kept = (labels != -100).flatten().nonzero()[:, 0]
    return F.cross_entropy(output.flatten(0, 1)[kept], labels.flatten()[kept])


def at_found_places(output: Tensor, labels: Tensor) -> Tensor:
    kept = torch.where(labels != -100)
    return F.cross_entropy(output[kept], labels[kept])


def one_by_one(output: Tensor, labels: Tensor) -> Tensor:
    places = [(i, j) for i in range(3) for j in range(6) if labels[i, j] != -100]
    losses = [-output[place].log_softmax(-1)[labels[place]] for place in places]
    return torch.stack(losses).mean()


def over_a_share(output: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(output.mT, labels, reduction="none")
    return losses.mean() / (labels != -100).double().mean().item()


def mapped(output: Tensor, labels: Tensor) -> Tensor:
    losses = torch.func.vmap(lambda rows, wanted: (rows.mean(-1) * wanted).sum())(output, labels)
    return losses.sum() / 100


HIDDEN = (
    hidden_beside_a_penalty,
    *(hidden, hidden_beside_another, operator, over_a_count_of_losses, at_places),
    *(at_found_places, one_by_one, over_a_share, mapped),
)


@pytest.mark.parametrize("loss", HIDDEN, ids=lambda loss: loss.__name__)
def test_a_loss_that_may_hide_a_mean_is_told_by_its_targets(loss: Loss) -> None:
    (text,) = said(loss, padded([3, 5, 4], -100))
    assert "samples have 3 to 5 targets that are not -100" in text or "mask" in text


def test_targets_that_no_mean_is_over_are_not_counted() -> None:
    def loss(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output.mT, targets["labels"], ignore_index=0) + F.cross_entropy(
            output[:, 0], targets["domain"]
        )

    domain = torch.tensor([0, 1, 2])
    assert said(loss, {"labels": padded([4, 4, 4], 0), "domain": domain}) == []
    (text,) = said(loss, {"labels": padded([3, 5, 4], 0), "domain": domain})
    assert "samples have 3 to 5 targets that are not 0" in text


def test_micro_batches_of_one_sample_each_are_compared_in_what_the_loss_makes() -> None:
    check = MaskedMeanCheck(filled, 2)
    output = torch.randn(1, 6, CLASSES, requires_grad=True)
    check(output, padded([3], 0))
    with pytest.warns(UserWarning, match="samples have 3 to 5 targets"):
        check(output, padded([5], 0))
