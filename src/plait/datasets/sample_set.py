"""A set of samples, as loaders and mixtures see it."""

from __future__ import annotations

from typing import Protocol

from plait.values import PyTree


class SampleSet(Protocol):
    """Samples by index. A set may also have `batch(indices)`, which stacks several of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PyTree: ...
