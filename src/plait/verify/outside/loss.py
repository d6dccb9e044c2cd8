"""A user's loss as a sum and a count, so that slices of a batch add up.

A mean over targets becomes sum and count of the targets that are not ignored. A mean over samples
becomes sum and number of samples. Which of the two it is, is found by trying it on two halves of a
batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from plait.batch_trees import map_tensors
from plait.errors import ModelError
from plait.values import PyTree
from plait.verify.reference.batches import Batch, num_samples, taken
from plait.verify.reference.copied import copied, in_precision
from plait.verify.reference.one_device import call
from plait.verify.reference.recipe import Loss

IGNORED = -100
Count = Callable[[PyTree, int], float]


def summed(model: nn.Module, batch: Batch, loss: Loss) -> tuple[Loss, bool]:
    """The loss as (sum, count), and whether parts of a batch add up under it.

    A model with batch norms is tried in float64, with the running statistics that samples share.
    """
    model, batch = _separable(model, batch)
    with torch.no_grad():
        value = loss(call(model, batch[0]), batch[1])
    if isinstance(value, tuple):
        return loss, True
    samples = num_samples(batch)
    halves = [
        taken(batch, range(samples // 2)),
        taken(batch, range(samples // 2, samples)),
    ]
    for count in (_targets, _shifted, _samples):
        as_sum = _with(loss, count)
        if samples > 1 and _adds_up(model, as_sum, batch, halves):
            return as_sum, True
    return _with(loss, _samples), False


def _separable(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    """A copy whose batch norms do not mix samples, in float64 if it has any, and its batch."""
    model = copied(model)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module in norms:
        module.eval()
    if norms:
        return in_precision(model, torch.float64), map_tensors(_widened, batch)
    return model, batch


def _widened(leaf: Tensor) -> Tensor:
    return leaf.double() if leaf.is_floating_point() else leaf


def _with(loss: Loss, count: Count) -> Loss:
    def as_sum(output: PyTree, targets: PyTree) -> tuple[Tensor, float]:
        value = loss(output, targets)
        number = count(targets, _num_rows(output, targets))
        return value * number, number

    return as_sum


def _num_rows(output: PyTree, targets: PyTree) -> int:
    """The samples of an output; of the targets where a model returns its loss alone."""
    for leaf in (*tree_leaves(output), *tree_leaves(targets)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ModelError(
        "neither the output of the model nor the targets have a tensor with a row for each sample, "
        "so that losses of parts of a batch cannot be weighed; return (sum, count) from the loss"
    )


def _adds_up(model: nn.Module, loss: Loss, batch: Batch, halves: list[Batch]) -> bool:
    with torch.no_grad():
        total, number = (float(part) for part in loss(call(model, batch[0]), batch[1]))
        parts = [loss(call(model, half[0]), half[1]) for half in halves]
    added = sum(float(part[0]) for part in parts)
    numbers = sum(float(part[1]) for part in parts)
    return number == numbers and abs(added - total) <= 1e-6 * max(abs(total), 1e-30)


def _targets(targets: PyTree, samples: int) -> float:
    return _unmasked(targets, slice(None))


def _shifted(targets: PyTree, samples: int) -> float:
    return _unmasked(targets, slice(1, None))


def _unmasked(targets: PyTree, part: slice) -> float:
    labels = targets.get("labels") if isinstance(targets, dict) else targets
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return -1.0
    return float((labels[..., part] != IGNORED).sum())


def _samples(targets: PyTree, samples: int) -> float:
    return float(samples)


def of_output(output: PyTree, targets: PyTree) -> Tensor:
    """The loss (0-dim) that a model computes itself, as Hugging Face models do: `output.loss`."""
    value: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return value
