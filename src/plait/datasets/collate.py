"""Samples of a data set stacked into a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.errors import DataError


def collate(dataset: Any, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Samples [B] stacked, [B, ...] each; through the data set's own `batch` where it has one."""
    if hasattr(dataset, "batch"):
        batch: tuple[Tensor, Tensor] = dataset.batch(indices)
        return batch
    samples = [dataset[index] for index in indices.tolist()]
    if not samples:
        inputs, targets = (torch.as_tensor(part) for part in dataset[0])
        return inputs.new_empty((0, *inputs.shape)), targets.new_empty((0, *targets.shape))
    try:
        inputs, targets = (
            torch.stack([torch.as_tensor(part) for part in parts])
            for parts in zip(*samples, strict=True)
        )
    except (RuntimeError, TypeError, ValueError) as failure:
        raise DataError(
            f"the samples {indices.tolist()} cannot be stacked into (inputs, targets): {failure}"
        ) from failure
    return inputs, targets
