"""The loss of a part of a batch as a sum and a count, and the count that is expected."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plait.values import PyTree
from plait.verify.reference.batches import Batch, num_samples
from plait.verify.reference.recipe import Loss


def loss_sum(loss: Loss, output: PyTree, batch: Batch) -> tuple[Tensor, float]:
    """(sum (0-dim), count) of one part: a loss that is one number is a mean over its samples."""
    result = loss(output, batch[1])
    if isinstance(result, Tensor):
        samples = num_samples(batch)
        return result * samples, float(samples)
    total, count = result
    return total, float(count)


def expected_count(loss: Loss, batches: Sequence[Batch]) -> float:
    """The count of the loss over all parts, before it is computed; 1 where nothing counts.

    It is what the loss's own `count` says of the targets, else the number of samples.
    """
    count = getattr(loss, "count", None)
    filled = [batch for batch in batches if num_samples(batch)]
    if callable(count):
        return float(sum(count(targets) for _, targets in filled)) or 1.0
    return float(sum(map(num_samples, filled))) or 1.0
