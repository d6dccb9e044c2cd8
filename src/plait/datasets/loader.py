"""The loader: an endless stream of global batches, of which each data coordinate takes its slice.

The order is a function of (seed, epoch) and the place in it a number of samples. Neither knows how
many ranks there are. So a run resumes exactly under any plan, and the ranks' slices always join to
the same global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.datasets.hashing import seed_of
from plait.errors import DataError

MAX_EPOCHS = 1 << 53


class Loader:
    """Yields `(inputs, targets)`, this coordinate's contiguous part of each global batch.

    The last batch of an epoch is as short as what is left. Parts differ by one sample at most. With
    fewer samples than ranks some parts have none: tensors of the right shape with a first dim of 0.
    """

    def __init__(
        self, dataset: Any, global_batch: int, *, dp_size: int = 1, dp_rank: int = 0, seed: int = 0
    ) -> None:
        if global_batch < 1:
            raise DataError(f"global_batch = {global_batch}: must be at least 1")
        if not 0 <= dp_rank < dp_size:
            raise DataError(f"dp_rank = {dp_rank} is not in 0 .. {dp_size - 1}")
        if len(dataset) == 0:
            raise DataError("the data set has no samples")
        self.dataset = dataset
        self.global_batch = global_batch
        self.seed = seed
        self.dp_size = dp_size
        self.dp_rank = dp_rank
        self.epoch = self.position = 0
        self._order: tuple[int, Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.position >= len(self.dataset):
            self.epoch = self.epoch + 1
            self.position = 0
        whole = self.order()[self.position : self.position + self.global_batch]
        self.position += len(whole)
        start, stop = (
            len(whole) * rank // self.dp_size for rank in (self.dp_rank, self.dp_rank + 1)
        )
        return collate(self.dataset, whole[start:stop])

    @property
    def batches_per_epoch(self) -> int:
        """Batches in an epoch that is read from its beginning, a short last one included."""
        return -(-len(self.dataset) // self.global_batch)

    def skip(self, num_batches: int) -> None:
        """Be where a new stream is after that many batches."""
        self.epoch, index = divmod(num_batches, self.batches_per_epoch)
        self.position = index * self.global_batch

    def order(self) -> Tensor:
        """The permutation of the current epoch, made once an epoch."""
        if self._order is None or self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch))
            self._order = self.epoch, torch.randperm(len(self.dataset), generator=generator)
        return self._order[1]

    def state_dict(self) -> dict[str, int]:
        """Where the stream is, and of what."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "num_samples": len(self.dataset),
        }

    def load_state_dict(self, state: Mapping[str, int], num_batches: int | None = None) -> None:
        """Go on from `state`, under any number of ranks; `num_batches` is how many had been read.

        Raises `DataError` if the stream is another one, or the place none that a stream can be at.
        """
        here = self.state_dict()
        for key in here:
            value = state.get(key) if isinstance(state, Mapping) else None
            if not isinstance(value, int) or isinstance(value, bool):
                raise DataError(f"the data's saved place says {key} = {value!r}, no whole number")
        for key in ("seed", "num_samples"):
            if state[key] != here[key]:
                raise DataError(
                    f"the data was saved with {key} = {state[key]} and now has {here[key]}: its "
                    "order would differ"
                )
        epoch = state["epoch"]
        position = state["position"]
        most = MAX_EPOCHS if num_batches is None else num_batches
        if not (0 <= position <= here["num_samples"] and 0 <= epoch <= most):
            raise DataError(
                f"the data's saved place is sample {position} of epoch {epoch}, and there are "
                f"{here['num_samples']} samples an epoch and at most {most} epochs read"
            )
        self.epoch = epoch
        self.position = position


class InOrder:
    """Batches of a data set in its order, once: this coordinate's part of each.

    `batches` limits their number; None means the whole set.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        *,
        dp_size: int = 1,
        dp_rank: int = 0,
        batches: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.global_batch = global_batch
        self.dp_size = dp_size
        self.dp_rank = dp_rank
        most = len(dataset) if batches is None else batches * global_batch
        self.num_samples = min(len(dataset), most)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, self.num_samples, self.global_batch):
            end = min(begin + self.global_batch, self.num_samples)
            size = end - begin
            first = begin + size * self.dp_rank // self.dp_size
            last = begin + size * (self.dp_rank + 1) // self.dp_size
            yield collate(self.dataset, torch.arange(first, last))


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
