"""Buffers that every data rank keeps of its own samples, on one device: a batch norm's running
statistics.

One device that runs the slices of all ranks changes back and forth between their buffers. What a
checkpoint keeps of them is the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies [...] of the buffers that a checkpoint keeps."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name in kept}


class BuffersApart:
    """The persistent buffers of a model, for each rank whose slices have run."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._start = self._values()
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._rank: int | None = None

    def enter(self, rank: int) -> None:
        """Make the buffers those of a rank, whose slice runs next."""
        if rank == self._rank:
            return
        self._leave()
        self._write(self._kept.get(rank, self._start))
        self._rank = rank

    @contextmanager
    def together(self) -> Iterator[None]:
        """Changes inside hold for all ranks alike: a bias that follows the global load."""
        self._leave()
        before = self._values()
        yield
        changed = {
            name: buffer
            for name, buffer in self._values().items()
            if not torch.equal(buffer, before[name])
        }
        for kept in (self._start, *self._kept.values()):
            kept.update({name: buffer.clone() for name, buffer in changed.items()})

    def mean(self) -> dict[str, Tensor]:
        """The mean of each buffer [...] over the ranks; of whole numbers the first rank's."""
        self._leave()
        ranks = [self._kept[rank] for rank in sorted(self._kept)] or [self._start]
        found: dict[str, Tensor] = {}
        for name, value in ranks[0].items():
            found[name] = value.clone()
            if value.is_floating_point() and len(ranks) > 1:
                found[name] = torch.stack([kept[name] for kept in ranks]).mean(0)
        return found

    def first(self) -> dict[str, Tensor]:
        """The first rank's buffers [...]."""
        self._leave()
        kept = self._kept[min(self._kept)] if self._kept else self._start
        return {name: value.clone() for name, value in kept.items()}

    def _leave(self) -> None:
        if self._rank is not None:
            self._kept[self._rank] = self._values()

    def _values(self) -> dict[str, Tensor]:
        return persistent_buffers(self._model)

    def _write(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                if name in values:
                    buffer.copy_(values[name])
