"""Samples of a data set stacked into a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from plait.datasets.sample_set import SampleSet
from plait.errors import DataError
from plait.values import PyTree

Batch: TypeAlias = tuple[PyTree, Tensor]
"""Inputs and targets of several samples."""


def collate(dataset: SampleSet, indices: Tensor) -> Batch:
    """Samples [B] stacked, [B, ...] each; through the data set's own `batch` where it has one.

    Raises:
        DataError: samples that cannot be stacked.
    """
    if hasattr(dataset, "batch"):
        batch: Batch = dataset.batch(indices)
        return batch
    samples = [dataset[index] for index in indices.tolist()]
    if not samples:
        inputs, targets = (tree_map(lambda x: x[:0], _stacked([part])) for part in dataset[0])
        return inputs, targets
    try:
        inputs, targets = (_stacked(parts) for parts in zip(*samples, strict=True))
    except (RuntimeError, TypeError, ValueError, KeyError) as failure:
        raise DataError(
            f"the samples {indices.tolist()} cannot be stacked into (inputs, targets): {failure}"
        ) from failure
    return inputs, targets


def _stacked(parts: Sequence[PyTree]) -> PyTree:
    """The tensors of all samples, stacked; a tuple of tensors gives a tuple of stacks, and a
    mapping a dict.
    """
    if isinstance(parts[0], Mapping):
        return {key: _stacked([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(_stacked(column) for column in zip(*parts, strict=True))
    return torch.stack([torch.as_tensor(part) for part in parts])
