"""Private data of a client: its samples, and the state that it keeps between rounds.

None of it has a way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.datasets.collate import collate
from plait.datasets.sample_set import SampleSet
from plait.values import JsonObject, PyTree


class Subset:
    """Some samples of a data set, as a data set."""

    def __init__(self, dataset: SampleSet, indices: Sequence[int]) -> None:
        self._dataset, self._indices = dataset, torch.as_tensor(list(indices), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> PyTree:
        return self._dataset[int(self._indices[index])]

    def batch(self, indices: Tensor) -> PyTree:
        """Samples [B] -> (inputs [B, ...], targets [B, ...]), of the samples of this part."""
        return collate(self._dataset, self._indices[indices])


@dataclass(frozen=True)
class ClientState:
    """The state of a client between rounds: SCAFFOLD's control (numel,), float16's loss scale."""

    control: Tensor | None = None
    scale: JsonObject | None = None


@dataclass
class Samples:
    """One client's own: what it trains on, what it is evaluated on, and what it keeps from round to
    round.
    """

    client: int
    train: Subset
    test: Subset
    kept: ClientState = field(default_factory=ClientState)
