"""Batches that worker processes read ahead, in the order in which they are asked for.

The processes are those of torch's `DataLoader`. What is read ahead is no part of the place in a
stream: a run that resumes reads it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from plait.datasets.collate import collate
from plait.errors import PlaitError


class _Failed:
    """An error of a worker, in words."""

    def __init__(self, error: PlaitError) -> None:
        self.kind = type(error)
        self.message = str(error)


class _Batches(Dataset[Any]):
    """Batches by their indices."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, indices: Tensor) -> Any:
        try:
            return collate(self._dataset, indices)
        except PlaitError as error:
            return _Failed(error)


def read_ahead(dataset: Any, indices: Iterator[Tensor], workers: int) -> Iterator[Any]:
    """The batch of each tensor of indices, from so many processes; pinned where there is a GPU."""
    loader: DataLoader[Any] = DataLoader(
        _Batches(dataset),
        sampler=_Endless(indices),
        batch_size=None,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
    )
    for batch in loader:
        if isinstance(batch, _Failed):
            raise batch.kind(batch.message)
        yield batch


class _Endless(torch.utils.data.Sampler[Tensor]):
    """Tensors of indices as a sampler of torch's loader."""

    def __init__(self, indices: Iterator[Tensor]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Tensor]:
        return self._indices
