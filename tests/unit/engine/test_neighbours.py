"""A loss over neighbours in the batch is told, since each part has other ones; blocks are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.engine.masked_means import MaskedMeanCheck
from plait.engine.neighbours import Neighbours

Loss = Callable[[Tensor, Tensor], Tensor]
B = 8


def mixed_up(output: Tensor, targets: Tensor) -> Tensor:
    order, classes = torch.randperm(len(output)), targets.argmax(1)
    return 0.3 * F.cross_entropy(output, classes) + F.cross_entropy(output, classes[order])


def two_views(output: Tensor, targets: Tensor) -> Tensor:
    first, second = F.normalize(output, dim=-1).chunk(2)
    return 2 - 2 * (first * second).sum(-1).mean()


def contrasted(output: Tensor, targets: Tensor) -> Tensor:
    first, second = output[: B // 2], output[B // 2 :]
    return F.cross_entropy(first @ second.T, torch.arange(len(first)))


def from_an_anchor(output: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([(one - output[0]).square().mean() for one in output]).mean()


def of_a_list(output: Tensor, targets: Tensor) -> Tensor:
    return F.triplet_margin_loss(output[[0, 1, 2]], output[[3, 4, 5]], output[[5, 6, 7]])


def losses(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean(1)


def of_environments(output: Tensor, targets: Tensor) -> Tensor:
    """The variance of the means of environments (VREx)."""
    kinds = torch.stack([targets[:, 0] > 0, targets[:, 0] <= 0]).float()
    means = torch.stack([(losses(output, targets) * kind).mean() for kind in kinds])
    return means.mean() + means.var()


COMPARING: dict[str, Loss] = {
    "neighbours": lambda output, targets: (output[1:] - output[:-1]).square().mean(),
    "neighbours in a loss": lambda output, targets: F.mse_loss(output[1:], output[:-1]),
    "rolled": lambda output, targets: F.cosine_similarity(output, output.roll(1, 0)).mean(),
    "rolled negatives": lambda output, targets: F.triplet_margin_loss(
        output, targets, torch.roll(targets, 1, dims=0)
    ),
    "flipped": lambda output, targets: (output - torch.flip(output, [0])).abs().mean(),
    "in another order": lambda output, targets: F.mse_loss(
        output, output.index_select(0, torch.randperm(B))
    ),
    "halves": lambda output, targets: F.mse_loss(output[: B // 2], output[B // 2 :]),
    "an anchor": lambda output, targets: (output - output[0]).square().mean(),
    "weights of places": lambda output, targets: (
        torch.linspace(0, 1, B) * losses(output, targets)
    ).mean(),
    "decay by places": lambda output, targets: (
        0.9 ** torch.arange(B)[:, None] * (output - targets).square()
    ).mean(),
    "an anchor without gradient": lambda output, targets: (
        (output - output[-1].detach()).square().mean()
    ),
    "an anchor with a dim": lambda output, targets: (output - output[:1]).square().mean(),
    "second differences": lambda output, targets: (
        (output[2:] - 2 * output[1:-1] + output[:-2]).abs().mean()
    ),
    "an order of numpy": lambda output, targets: F.mse_loss(
        output, targets[np.roll(np.arange(B), 3)]
    ),
    "narrowed": lambda output, targets: F.l1_loss(
        output.narrow(0, 1, B - 1), output.narrow(0, 0, B - 1)
    ),
    "rolled numbers": lambda output, targets: F.mse_loss(output[:, 0], output[:, 0].roll(1)),
    "rolled both ways": lambda output, targets: F.mse_loss(output, output.roll((1, 1), (0, 1))),
    **{one.__name__: one for one in (mixed_up, two_views, contrasted, from_an_anchor)},
    **{one.__name__: one for one in (of_a_list, of_environments)},
}


def in_the_same_order(output: Tensor, targets: Tensor) -> Tensor:
    order = torch.randperm(len(output))
    return F.mse_loss(output[order], targets[order]) + F.mse_loss(output.flip(0), targets.flip(0))


def in_a_loop(output: Tensor, targets: Tensor) -> Tensor:
    total = output.new_zeros(())
    for place in range(len(output)):
        total = total - (output[place] - targets[place]).square().mean()
    return -total / len(output)


def joined(output: Tensor, targets: Tensor) -> Tensor:
    both = torch.cat([output, 2 * output])
    return F.mse_loss(both, torch.cat([targets, targets])) + F.mse_loss(both[:B], both[B:])


def logged(output: Tensor, targets: Tensor) -> Tensor:
    assert (output[1:] - output[:-1]).abs().mean().item() >= 0
    return F.mse_loss(output, targets)


def with_signs_of_pairs(output: Tensor, targets: Tensor) -> Tensor:
    signs = 1 - 2 * (torch.arange(B) % 2)
    return F.softplus((signs * output.mean(1)).view(-1, 2).sum(1)).mean()


def time_first(output: Tensor, targets: Tensor) -> Tensor:
    weights = torch.linspace(1, 0.1, output.shape[1])[:, None]
    return (weights * (output.T - targets.T).abs()).mean()


def by_a_table(output: Tensor, targets: Tensor) -> Tensor:
    """Prototypes of classes, of which there are as many as there are samples."""
    kinds, prototypes = targets.argmax(1), output.detach().exp()
    return (prototypes[kinds][:, :2] - output[:, :2]).square().mean()


def of_classes(output: Tensor, targets: Tensor) -> Tensor:
    """Weights of the classes, of which there are as many as there are samples."""
    chosen = output.log_softmax(1)[torch.arange(B), targets.argmax(1)]
    return (output.softmax(1) * torch.arange(output.shape[1])).sum(1).mean() - chosen.mean()


APART: dict[str, Loss] = {
    "positions": lambda output, targets: F.mse_loss(output[:, 1:], output[:, :-1]),
    "pairs in steps": lambda output, targets: F.mse_loss(output[0::2], output[1::2]),
    "pairs of a view": lambda output, targets: F.mse_loss(
        output.view(B // 2, 2, -1)[:, 0], output.view(B // 2, 2, -1)[:, 1]
    ),
    "halves of losses": lambda output, targets: (
        losses(output, targets)[: B // 2] + losses(output, targets)[B // 2 :]
    ).mean(),
    "places of features": lambda output, targets: F.mse_loss(output.roll(1, 1), targets.flip(1)),
    "classes of a list": lambda output, targets: F.cross_entropy(
        output, torch.tensor(list(range(B)))
    ),
    "a guard": lambda output, targets: (
        losses(output, targets)
        .masked_fill(~torch.isfinite(losses(output, targets).sum()), 0.0)
        .mean()
    ),
    "random weights": lambda output, targets: (torch.rand(B) * losses(output, targets)).mean(),
    **{one.__name__: one for one in (in_the_same_order, in_a_loop, joined, logged, of_classes)},
    **{one.__name__: one for one in (with_signs_of_pairs, time_first, by_a_table)},
}


def said(loss: Loss, outputs: int = B, width: int = B) -> list[str]:
    torch.manual_seed(0)
    check = MaskedMeanCheck(loss, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(torch.randn(outputs, width, requires_grad=True), torch.randn(B, width))
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("kind", COMPARING)
def test_samples_that_meet_others_are_told(kind: str) -> None:
    (text,) = said(COMPARING[kind], width=5)
    assert "the loss compares samples of a batch" in text


@pytest.mark.parametrize("kind", APART)
def test_samples_or_blocks_of_them_by_themselves_say_nothing(kind: str) -> None:
    assert said(APART[kind]) == []


def test_halves_of_what_a_model_made_of_a_batch_are_its_samples() -> None:
    """The outputs of real and false samples behind each other have twice as many rows."""

    def relative(output: Tensor, targets: Tensor) -> Tensor:
        real, false = output[: len(targets)], output[len(targets) :]
        return F.softplus(false - real).mean()

    assert said(relative, outputs=2 * B) == []


def test_classes_of_a_range_are_the_samples() -> None:
    """A model that gives similarities [B, B], as CLIP of transformers."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, torch.tensor(range(len(output))))

    (text,) = said(loss)
    assert "the loss compares samples of a batch" in text


def test_large_batches_are_followed_at_no_great_cost() -> None:
    """A set of places for each row took seconds."""
    rows = 1 << 20
    output, targets = torch.zeros(rows, 1, requires_grad=True), torch.zeros(rows, 1)
    follower = Neighbours(output, targets)
    with follower:
        same = sum(F.mse_loss(output * 2, targets + 1) for _ in range(20))
        others = F.mse_loss(output[1:], targets[:-1])
    assert not follower.found(same)
    assert follower.found(others) == "mse_loss"
