"""A sum over samples by a number that knows nothing of the batch's size is still a sum."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.engine.masked_means import MaskedMeanCheck
from plait.values import PyTree

Loss = Callable[[Tensor, Tensor], Tensor]


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square()


def half(output: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * squares(output, targets).sum()


def halves(output: Tensor, targets: Tensor) -> Tensor:
    return (squares(output, targets) / 2).sum()


def in_place(output: Tensor, targets: Tensor) -> Tensor:
    loss = F.mse_loss(output, targets, reduction="sum")
    loss /= 100
    return loss


def divergence(output: Tensor, targets: Tensor) -> Tensor:
    """A mean with the divergence of a variational autoencoder, which is a sum."""
    spread = -0.5 * torch.sum(1 + output - output.exp() - targets**2)
    return F.mse_loss(output, targets) + 0.1 * spread


def weighed(output: Tensor, targets: Tensor) -> Tensor:
    """A sum of squares by weights of the noise of samples, over a constant, as EDM has it."""
    weights = (targets.square().mean(1, keepdim=True) + 1) / targets.exp().mean(1, keepdim=True)
    return (weights * squares(output, targets)).sum() / 8


def weighed_twice(output: Tensor, targets: Tensor) -> Tensor:
    return (targets.exp() * (squares(output, targets) * targets.cosh())).sum()


def by_weights_of_one(output: Tensor, targets: Tensor) -> Tensor:
    weights = targets.exp()
    return (weights / weights.sum() * squares(output, targets)).sum()


def by_two_weights_of_one(output: Tensor, targets: Tensor) -> Tensor:
    samples, features = targets.sum(1, keepdim=True).softmax(0), targets.softmax(1)
    return (samples * (features * squares(output, targets))).sum()


def by_divided_weights(output: Tensor, targets: Tensor) -> Tensor:
    return (targets.exp() / len(targets) * squares(output, targets).mean(1, keepdim=True)).sum()


def over_samples(output: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * squares(output, targets).sum() / len(output)


def by_a_share(output: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (squares(output, targets) * (1 / targets.shape[0])).sum()


def over_a_read_count(output: Tensor, targets: Tensor) -> Tensor:
    return squares(output, targets).sum() / torch.ones_like(targets).sum().item()


def over_a_list(output: Tensor, targets: Tensor) -> Tensor:
    pairs = list(zip(output, targets, strict=True))
    return sum((squares(*pair).sum() for pair in pairs), torch.tensor(0.0)) / len(pairs)


def of_sums(output: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (0.5 * squares(output, targets).sum(1)).mean()


def products(output: Tensor, targets: Tensor) -> Tensor:
    return torch.dot(output.flatten(), targets.flatten())


def half_of_products(output: Tensor, targets: Tensor) -> Tensor:
    """An agreement with a target by Einstein's sum."""
    return 0.5 * torch.einsum("bd,bd->", output, targets)


def weighed_rows(output: Tensor, targets: Tensor) -> Tensor:
    return squares(output, targets).mean(1) @ targets.exp().mean(1)


def means_of_rows(output: Tensor, targets: Tensor) -> Tensor:
    return squares(output, targets).mean(dim=-1).sum()


def by_variances(output: Tensor, targets: Tensor) -> Tensor:
    """The likelihood of a Gaussian whose variance is a result of the model."""
    mean, log_variance = output[:, :1], output[:, 1:2]
    return (squares(mean, targets) / log_variance.exp() + log_variance).sum()


def by_known_deviations(output: Tensor, targets: Tensor) -> Tensor:
    return torch.div((output - targets).abs(), targets.exp()).sum()


def mean_of_variances(output: Tensor, targets: Tensor) -> Tensor:
    return (squares(output, targets) / targets.exp()).mean()


def rows_by_divisors_of_one(output: Tensor, targets: Tensor) -> Tensor:
    return (squares(output, targets).mean(1) / (1 / targets.mean(1).softmax(0))).sum()


def means_of_rows_over_a_weight(output: Tensor, targets: Tensor) -> Tensor:
    weights = targets.exp().mean(1)
    return (weights * squares(output, targets).mean(1)).sum() / weights.sum()


def rows_by_weights_of_one(output: Tensor, targets: Tensor) -> Tensor:
    return squares(output, targets).mean(1) @ targets.mean(1).softmax(0)


def products_over_samples(output: Tensor, targets: Tensor) -> Tensor:
    return torch.dot(output.flatten(), targets.flatten()) / len(output)


def norm_of_means(output: Tensor, targets: Tensor) -> Tensor:
    means = (output - targets).mean(0)
    return means @ means


def nothing(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets) + 0.0 * output.sum()


def said(loss: Loss, targets: PyTree) -> list[str]:
    check = MaskedMeanCheck(loss, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(torch.randn(4, 3, requires_grad=True), targets)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    "loss",
    [
        *(half, halves, in_place, divergence, weighed, weighed_twice),
        *(products, half_of_products, weighed_rows),
        *(means_of_rows, by_variances, by_known_deviations),
    ],
)
def test_a_sum_by_a_constant_is_told(loss: Loss) -> None:
    (text,) = said(loss, torch.randn(4, 3))
    assert "it is a sum over them" in text


@pytest.mark.parametrize(
    "loss",
    [
        *(over_samples, by_a_share, over_a_read_count, over_a_list, of_sums, nothing),
        *(by_divided_weights, products_over_samples, mean_of_variances),
    ],
)
def test_a_sum_by_a_number_of_the_batch_says_nothing(loss: Loss) -> None:
    assert said(loss, torch.randn(4, 3)) == []


@pytest.mark.parametrize(
    "loss",
    [
        by_weights_of_one,
        by_two_weights_of_one,
        rows_by_weights_of_one,
        norm_of_means,
        rows_by_divisors_of_one,
        means_of_rows_over_a_weight,
    ],
)
def test_weights_that_add_up_to_one_make_no_sum(loss: Loss) -> None:
    assert not any("it is a sum" in text for text in said(loss, torch.randn(4, 3)))


def test_targets_with_a_list_may_tell_the_number_of_samples() -> None:
    def loss(output: Tensor, targets: dict[str, list[str]]) -> Tensor:
        return output.square().sum() / len(targets["texts"])

    assert said(loss, {"texts": ["a", "b", "c", "d"]}) == []  # type: ignore[arg-type]


def turned(output: Tensor, targets: Tensor) -> Tensor:
    return squares(output, targets).T.mean(1).sum()


def turned_by_dims(output: Tensor, targets: Tensor) -> Tensor:
    return squares(output, targets).transpose(0, 1).exp().mean(dim=-1).sum()


@pytest.mark.parametrize("loss", [turned, turned_by_dims])
def test_a_mean_over_samples_that_are_columns_says_nothing(loss: Loss) -> None:
    """A square matrix has as many features as samples."""
    check = MaskedMeanCheck(loss, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(torch.randn(4, 4, requires_grad=True), torch.randn(4, 4))


def test_outputs_of_other_rows_are_no_samples() -> None:
    """A codebook and the losses of layers are the same for each part of a batch."""

    def loss(output: dict[str, Tensor], targets: Tensor) -> Tensor:
        of_layers = output["layers"].sum() + output["layers"] @ torch.tensor([0.1, 0.2, 0.3])
        codes = output["codebook"].square().mean(1).sum()
        return F.mse_loss(output["made"], targets) + of_layers + codes

    rows = {"made": (4, 3), "codebook": (7, 3), "layers": (3,)}
    output = {name: torch.randn(shape, requires_grad=True) for name, shape in rows.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MaskedMeanCheck(loss, 2)(output, torch.randn(4, 3))
