"""A mean over a mask or over weights is told where samples have different sums of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

Loss = Callable[[Tensor, dict[str, Tensor]], Tensor | tuple[Tensor, Tensor]]


def losses_of(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """A loss [B, 4] for each place."""
    return F.cross_entropy(output.transpose(1, 2), targets["labels"], reduction="none")


def over_a_mask(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return (losses_of(output, targets) * targets["mask"]).sum() / targets["mask"].sum()


def over_a_safe_mask(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    mask = targets["mask"].float()
    return (losses_of(output, targets) * mask).sum() / (mask.sum() + 1e-8).clamp(min=1)


def by_means(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    mask = targets["mask"]
    return (losses_of(output, targets) * mask).mean() / mask.float().mean()


def over_places(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return losses_of(output, targets)[targets["mask"].bool()].mean()


def selected(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return torch.masked_select(losses_of(output, targets), targets["mask"].bool()).mean()


def of_selected(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    kept = targets["mask"] > 0
    return F.cross_entropy(output[kept], targets["labels"][kept])


def by_a_number(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    mask = targets["mask"]
    return (losses_of(output, targets) * mask).sum() / max(mask.sum().item(), 1)


def by_a_length(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    kept = losses_of(output, targets)[targets["mask"].bool()]
    return kept.sum() / len(kept)


def by_a_shape(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    kept = targets["mask"] > 0
    total = F.cross_entropy(output[kept], targets["labels"][kept], reduction="sum")
    return total / output[kept].shape[0]


def flattened(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    losses, mask = losses_of(output, targets).view(-1), targets["mask"].view(-1)
    return losses[mask > 0].mean()


def of_flattened(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    kept = targets["mask"].flatten() != 0
    return F.cross_entropy(output.reshape(-1, 5)[kept], targets["labels"].flatten()[kept])


def over_a_flattened_mask(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    mask = targets["mask"].reshape(-1).float()
    return (losses_of(output, targets).reshape(-1) * mask).sum() / mask.sum().clamp(min=1e-8)


def by_indices(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    kept = targets["mask"].view(-1).nonzero().squeeze(1)
    return losses_of(output, targets).view(-1)[kept].mean()


def by_index_select(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    kept = torch.nonzero(targets["mask"].view(-1) > 0, as_tuple=True)[0]
    return torch.index_select(losses_of(output, targets).view(-1), 0, kept).mean()


def by_where(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    rows, columns = torch.where(targets["mask"] > 0)
    return losses_of(output, targets)[rows, columns].mean()


def by_take(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    kept = targets["mask"].flatten().argwhere()
    return losses_of(output, targets).take(kept).mean()


def by_a_number_of_indices(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    mask = targets["mask"] > 0
    return (losses_of(output, targets) * mask).sum() / max(len(mask.nonzero()), 1)


def with_another_term(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return 0.01 * output.square().mean() + over_a_mask(output, targets)


def counted(output: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (losses_of(output, targets) * targets["mask"]).sum(), targets["mask"].sum()


def of_each_sample(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    mask = targets["mask"]
    return ((losses_of(output, targets) * mask).sum(1) / mask.sum(1)).mean()


def of_tasks(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """A mean over weights of tasks, as many as a micro-batch has samples."""
    weights = torch.tensor([1.0, 2.0])
    tasks = torch.stack([losses_of(output, targets).mean(), output.square().mean()])
    return (tasks * weights).sum() / weights.sum()


def told_beside(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """A mean over all places; what is told of the mask has no gradient."""
    losses = losses_of(output, targets)
    kept = losses.detach()[targets["mask"].bool()].mean()
    share = (losses.detach() * targets["mask"]).sum() / targets["mask"].sum()
    assert kept >= 0 and share >= 0
    return losses.mean()


def told_as_numbers(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """A mean over all places, beside numbers that are told of the mask."""
    losses = losses_of(output, targets)
    kept = losses.detach()[targets["mask"].bool()]
    assert kept.sum().item() / len(kept) + targets["mask"].sum().item() > 0
    return losses.sum() / losses.numel()


def of_all_flattened(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.view(-1, 5), targets["labels"].view(-1))


def of_the_finite(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    losses = losses_of(output, targets).view(-1)
    return losses[losses.isfinite()].mean()


def of_the_first_places(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """A mean over the same places of each sample."""
    losses = losses_of(output, targets)
    kept = torch.arange(4).expand_as(losses) < 3
    return losses.reshape(-1)[kept.reshape(-1).nonzero().squeeze(1)].mean()


def of_the_best(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """A mean over as many places of each sample."""
    return losses_of(output, targets).gather(1, output.detach().sum(2).topk(2).indices).mean()


def by_classes(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """The number of each place's class, chosen by the class."""
    chances = output.log_softmax(2).view(-1, 5)
    labels = targets["labels"].view(-1)
    return -chances[torch.arange(len(labels)), labels].mean()


def by_chosen_weights(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    weights = torch.tensor([0.25, 0.75])[torch.where(targets["mask"] > 0, 1, 0)]
    return (losses_of(output, targets) * weights).mean()


def by_labels(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return -output.log_softmax(2).gather(2, targets["labels"][..., None]).mean()


def mapped(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """A mean over a mask in each sample, whose places are as many as the samples."""

    def of_one(row: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        kept = (F.cross_entropy(row, labels, reduction="none") * mask).sum()
        return kept / mask.sum()

    return torch.func.vmap(of_one)(output, targets["labels"], targets["mask"]).mean()


UNEVEN = (
    *(over_a_mask, over_a_safe_mask, by_means, over_places, selected, of_selected),
    *(by_a_number, by_a_length, by_a_shape, with_another_term),
    *(flattened, of_flattened, over_a_flattened_mask, by_indices, by_index_select),
    *(by_where, by_take, by_a_number_of_indices),
)
EVEN = (
    *(told_as_numbers, counted, of_each_sample, of_tasks, told_beside),
    *(of_all_flattened, of_the_finite, of_the_first_places, of_the_best, by_classes, by_labels),
    by_chosen_weights,
)


def said(loss: Loss, lengths: list[int], dtype: torch.dtype) -> list[str]:
    """The warnings of two steps of two micro-batches."""
    engine = plait.build(nn.Linear(3, 5), "mb2", loss=loss, optimizer=torch.optim.SGD)
    mask = torch.arange(4).expand(len(lengths), 4) < torch.tensor(lengths)[:, None]
    labels = torch.ones(len(lengths), 4, dtype=torch.int64)
    batch = torch.randn(len(lengths), 4, 3), {"labels": labels, "mask": mask.to(dtype)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step(batch)
        engine.step(batch)
    engine.world.close()
    return [str(one.message) for one in caught if "parts of a batch" in str(one.message)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("loss", UNEVEN, ids=lambda loss: loss.__name__)
def test_a_mean_over_an_uneven_mask_is_told_once(loss: Loss, dtype: torch.dtype) -> None:
    (text,) = said(loss, [1, 4, 2, 2], dtype)
    assert "a mean over a mask or over weights" in text
    assert "return (sum, count)" in text


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("loss", UNEVEN, ids=lambda loss: loss.__name__)
def test_a_mask_of_as_many_places_in_each_sample_says_nothing(
    loss: Loss, dtype: torch.dtype
) -> None:
    assert said(loss, [3, 3, 3, 3], dtype) == []


def test_a_function_of_each_sample_by_vmap_says_nothing() -> None:
    assert said(mapped, [1, 4, 2, 2, 3, 1, 1, 2], torch.float32) == []


@pytest.mark.parametrize("loss", EVEN, ids=lambda loss: loss.__name__)
def test_other_uses_of_a_mask_say_nothing(loss: Loss) -> None:
    assert said(loss, [1, 4, 2, 2], torch.float32) == []
