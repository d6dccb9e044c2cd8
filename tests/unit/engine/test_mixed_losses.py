"""A loss that compares samples with each other is told where a plan divides the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.engine.mixed_losses import MixedSamples

Loss = Callable[[Tensor, Tensor], Tensor]
SHAPES = ((4, 8), (8, 8), (6, 3), (2, 4))


def clip(output: Tensor, targets: Tensor) -> Tensor:
    logits = F.normalize(output, dim=-1) @ F.normalize(targets, dim=-1).T
    places = torch.arange(len(logits))
    return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


def in_batch(output: Tensor, targets: Tensor) -> Tensor:
    logits = torch.einsum("nd,md->nm", output, targets)
    return F.cross_entropy(logits, torch.arange(len(logits)))


def simclr(output: Tensor, targets: Tensor) -> Tensor:
    both = torch.cat([output, targets])
    return (both @ both.t()).logsumexp(1).mean()


def batch_hard(output: Tensor, targets: Tensor) -> Tensor:
    return torch.cdist(output, output).max(1).values.mean()


def pairs(output: Tensor, targets: Tensor) -> Tensor:
    return (output.unsqueeze(0) - output.unsqueeze(1)).pow(2).mean()


def cosines(output: Tensor, targets: Tensor) -> Tensor:
    return F.cosine_similarity(output[:, None], output[None], dim=-1).mean()


def labels_alike(output: Tensor, targets: Tensor) -> Tensor:
    labels = targets.argmax(1).view(-1, 1)
    return torch.eq(labels, labels.T).float().mean() * output.mean()


def barlow(output: Tensor, targets: Tensor) -> Tensor:
    centred = output - output.mean(0)
    return (centred.T @ centred).pow(2).mean()


def covariance(output: Tensor, targets: Tensor) -> Tensor:
    return (output.T @ targets).pow(2).mean()


def variance(output: Tensor, targets: Tensor) -> Tensor:
    return F.relu(1 - output.std(dim=0)).mean()


def advantages(output: Tensor, targets: Tensor) -> Tensor:
    given = targets[:, 0]
    given = (given - given.mean()) / (given.std() + 1e-8)
    return -(F.log_softmax(output, -1)[:, 0] * given).mean()


def cox(output: Tensor, targets: Tensor) -> Tensor:
    return (torch.logcumsumexp(output[:, 0], 0) - output[:, 0]).mean()


def load(output: Tensor, targets: Tensor) -> Tensor:
    return (output.mean(0) * targets.mean(0)).sum()


def root(output: Tensor, targets: Tensor) -> Tensor:
    return torch.sqrt(F.mse_loss(output, targets))


def root_of_a_sum(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum() ** 0.5


def norm(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).norm()


def focal(output: Tensor, targets: Tensor) -> Tensor:
    mean = F.cross_entropy(output, targets.argmax(1))
    return (1 - torch.exp(-mean)) ** 2 * mean


def focal_of_each(output: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(output, targets.argmax(1), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def norms_of_each(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets).norm(dim=1) / targets.norm(dim=1)).mean()


def told_beside(output: Tensor, targets: Tensor) -> Tensor:
    mean = F.mse_loss(output, targets)
    assert mean.detach().sqrt() >= 0 and mean.detach().exp() >= 1
    return mean


def of_two_parts(output: Tensor, targets: Tensor) -> Tensor:
    scale = torch.zeros((), requires_grad=True)
    return torch.exp(-scale) * F.mse_loss(output, targets) + scale + 0.5 * output.abs().mean()


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) ** 2).mean() + 0.1 * output.mean()


def classes(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets.argmax(1)) + (output * targets).sum(-1).mean()


def by_hand(output: Tensor, targets: Tensor) -> Tensor:
    one_hot = F.one_hot(targets.argmax(1), output.shape[1])
    return -(F.log_softmax(output, dim=-1) * one_hot).sum(1).mean()


def centred_rows(output: Tensor, targets: Tensor) -> Tensor:
    return (output - output.mean(1, keepdim=True)).pow(2).mean()


def turned(output: Tensor, targets: Tensor) -> Tensor:
    return (output.T - output.logsumexp(1)).T.mean() + (output.T * targets.T).mean()


def policy(output: Tensor, targets: Tensor) -> Tensor:
    ratio = (F.log_softmax(output, -1)[:, 0] - targets[:, 0]).exp()
    gain = torch.min(ratio * targets[:, 1], ratio.clamp(0.8, 1.2) * targets[:, 1])
    entropy = torch.distributions.Categorical(logits=output).entropy()
    return -gain.mean() - 0.01 * entropy.mean()


def distilled(output: Tensor, targets: Tensor) -> Tensor:
    wanted = F.softmax(targets / 2, -1)
    return F.kl_div(F.log_softmax(output / 2, -1), wanted, reduction="batchmean")


def dice(output: Tensor, targets: Tensor) -> Tensor:
    shared = 2 * (output * targets).sum(1)
    return (1 - shared / (output.abs().sum(1) + targets.abs().sum(1))).mean()


def each(output: Tensor, targets: Tensor) -> Tensor:
    pairs_of_rows = zip(output, targets, strict=True)
    return torch.stack([F.mse_loss(one, other) for one, other in pairs_of_rows]).mean()


class Doubled(torch.autograd.Function):
    """A function that torch's function modes do not see."""

    @staticmethod
    def forward(context: Any, given: Tensor) -> Tensor:
        return given * 2

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def hidden(output: Tensor, targets: Tensor) -> Tensor:
    doubled: Tensor = Doubled.apply(output @ targets.T)  # type: ignore[no-untyped-call]
    return doubled.logsumexp(1).mean()


def written(output: Tensor, targets: Tensor) -> Tensor:
    weights = torch.zeros_like(targets[:, 0])
    weights[:] = targets[:, 0] - targets[:, 0].mean()
    return (output[:, 0] * weights).mean()


def logged(output: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        assert ((output - output.mean(0)) * (targets - targets.mean(0))).sum().isfinite()
        assert (output.softmax(1).T @ output).isfinite().all()
    assert output.detach().std(dim=0).isfinite().all()
    mean = F.mse_loss(output, targets)
    assert mean.exp() >= 1
    return mean


def one_by_one(output: Tensor, targets: Tensor) -> Tensor:
    pairs_of_rows = zip(output, targets, strict=True)
    return sum((one - other).norm() for one, other in pairs_of_rows) / len(output)


def at_places(output: Tensor, targets: Tensor) -> Tensor:
    rows = range(len(output))
    return torch.stack([output[row].softmax(0) @ targets[row] for row in rows]).mean()


def matched(output: Tensor, targets: Tensor) -> Tensor:
    boxes, wanted = output[:, :, None].expand(-1, -1, 4), targets[:, :, None].expand(-1, -1, 4)
    return torch.stack(
        [torch.cdist(*pair).min(1).values.mean() for pair in zip(boxes, wanted, strict=True)]
    ).mean()


def by_a_matrix(output: Tensor, targets: Tensor) -> Tensor:
    apart, matrix = output - targets, torch.eye(output.shape[1])
    return torch.einsum("bi,ij,bj->b", apart, matrix, apart).mean()


def gradient_of_a_mean(output: Tensor, targets: Tensor) -> Tensor:
    mean = F.mse_loss(output, targets)
    (slope,) = torch.autograd.grad(mean, output, create_graph=True)
    return mean + slope.square().sum()


def gradient_of_each(output: Tensor, targets: Tensor) -> Tensor:
    losses = (output - targets).square().mean(1)
    (slopes,) = torch.autograd.grad(losses.sum(), output, create_graph=True)
    return (losses + slopes.square().sum(1)).mean()


def batch_dice(output: Tensor, targets: Tensor) -> Tensor:
    probabilities, places = output.sigmoid(), targets.sigmoid()
    both = 2 * (probabilities * places).sum(dim=(-1, -2))
    all_of_them = probabilities.sum(dim=(-1, -2)) + places.sum(dim=(-1, -2))
    all_of_them = torch.where(all_of_them == 0, both, all_of_them)
    return 1 - ((both + 1e-6) / (all_of_them + 1e-6)).mean()


def dice_by_classes(output: Tensor, targets: Tensor) -> Tensor:
    """Dice of each class over all samples, whose pixels stand in one row."""
    probabilities, places = (one[:, :, None].sigmoid() for one in (output, targets))
    rows = probabilities.transpose(0, 1).reshape(output.shape[1], -1)
    wanted = places.permute(1, 0, 2).contiguous().view(output.shape[1], -1)
    return 1 - 2 * ((rows * wanted).sum(-1) / (rows + wanted).sum(-1)).mean()


def weighted_by_outputs(output: Tensor, targets: Tensor) -> Tensor:
    weights = output[:, 0].exp()
    loss = (weights * targets[:, 0]).sum()
    loss /= weights.sum()
    return loss


def inverse(output: Tensor, targets: Tensor) -> Tensor:
    return 1 / (output - targets).square().mean()


def sums_of_turned(output: Tensor, targets: Tensor) -> Tensor:
    apart = (output - targets).square().T
    return (apart.sum(1) / apart.shape[1]).mean() + (apart.sum(0) / targets.abs().sum(1)).mean()


def product_of_means(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets) * output.square().mean()


def scaled_by_constants(output: Tensor, targets: Tensor) -> Tensor:
    loss, other = F.mse_loss(output, targets), output.square().mean()
    scale = nn.Parameter(torch.ones(()))
    return loss / scale + loss * (loss.detach() / other.detach()) + other / 2


MIXED = (
    *(batch_dice, dice_by_classes, weighted_by_outputs, inverse, product_of_means),
    *(clip, in_batch, simclr, batch_hard, pairs, cosines, labels_alike),
    *(barlow, covariance, variance, advantages, cox, load),
    *(root, root_of_a_sum, norm, focal, hidden, written, gradient_of_a_mean),
)
OF_EACH = (
    scaled_by_constants,
    *(squares, classes, by_hand, centred_rows, turned, policy, distilled, dice, each),
    *(focal_of_each, norms_of_each, told_beside, of_two_parts, logged),
    sums_of_turned,
    *(one_by_one, at_places, matched, by_a_matrix, gradient_of_each),
)


def found(loss: Loss, shape: tuple[int, int]) -> str:
    output, targets = torch.randn(shape, requires_grad=True), torch.randn(shape)
    with MixedSamples(output, targets) as mixed:
        value = loss(output, targets)
    return mixed.found(value)


@pytest.mark.parametrize("loss", MIXED, ids=lambda loss: loss.__name__)
def test_a_loss_that_compares_samples_is_seen(loss: Loss) -> None:
    assert all(found(loss, shape) for shape in SHAPES)


@pytest.mark.parametrize("loss", OF_EACH, ids=lambda loss: loss.__name__)
def test_a_mean_over_samples_is_not_taken_for_one(loss: Loss) -> None:
    assert not any(found(loss, shape) for shape in SHAPES)


def test_sequences_are_not_taken_for_samples() -> None:
    output, labels = torch.randn(4, 6, 8), torch.randint(0, 8, (4, 6))
    lengths = torch.full((4,), 6), torch.full((4,), 3)
    with MixedSamples(output, labels) as mixed:
        made = [
            F.cross_entropy(output.transpose(1, 2), labels),
            F.cross_entropy(output[:, :-1].reshape(-1, 8), labels[:, 1:].reshape(-1)),
            F.ctc_loss(
                output.transpose(0, 1).log_softmax(-1), labels[:, :3].clamp(min=1), *lengths
            ),
            (output.transpose(1, 2) @ output).pow(2).mean(),
        ]
    assert not mixed.found(made)


def test_a_selection_of_no_sample_is_not_followed() -> None:
    output = torch.randn(4, 5, requires_grad=True)
    with MixedSamples(output, torch.zeros(4)) as mixed:
        none = output[output[:, 0] > 100]
        made = (none - none[:, None].sum(1)).exp().sum()
    assert not mixed.found(made)


@pytest.mark.parametrize(("plan", "told"), [("mb2", True), ("dp1", False)])
def test_a_contrastive_loss_is_told_where_the_batch_is_divided(plan: str, told: bool) -> None:
    engine = plait.build(nn.Linear(3, 5), plan, loss=clip, optimizer=torch.optim.SGD)
    batch = (torch.randn(4, 3), torch.randn(4, 5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step(batch)
        engine.step(batch)
    engine.world.close()
    texts = [str(one.message) for one in caught if "compares samples" in str(one.message)]
    assert len(texts) == told
    assert all("2 parts" in text and "leave out dp, pp and mb" in text for text in texts)
