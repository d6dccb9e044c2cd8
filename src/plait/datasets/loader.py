"""The loader: an endless stream of global batches, of which each data coordinate takes its slice.

The order is a function of (seed, epoch) and the place in it a number of samples. Neither knows how
many ranks there are. So a run resumes exactly under any plan, and the ranks' slices always join to
the same global batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from plait.datasets.collate import Batch, collate
from plait.datasets.order import order_of
from plait.datasets.prefetch import read_ahead
from plait.datasets.sample_set import SampleSet
from plait.errors import DataError

MAX_EPOCHS = 1 << 53
SAME_ORDER = {
    "seed": "go on with the seed that it had",
    "num_samples": "give it the files and the [data] keys that it had; for other data engine.load "
    "takes the weights and the optimizer without the data's place",
}
"""The numbers that make the order of the data, and the cure where one of them has changed."""


def bounds(num_samples: int, shares: Sequence[int], rank: int) -> tuple[int, int]:
    """The samples [first, last) of a rank, where ranks share a batch in the ratio of `shares`.

    Parts are contiguous and join to the whole; equal shares differ by one sample at most.
    """
    total = sum(shares)
    before = sum(shares[:rank])
    return num_samples * before // total, num_samples * (before + shares[rank]) // total


def _checked_shares(shares: Sequence[int], size: int) -> tuple[int, ...]:
    """The shares of `size` ranks; equal where none are given."""
    if not shares:
        return (1,) * size
    if len(shares) != size or min(shares) < 1:
        raise DataError(f"shares {list(shares)} must be {size} whole numbers above 0")
    return tuple(shares)


class Loader:
    """Yields `(inputs, targets)`, tensors (samples here, ...): this coordinate's contiguous part of
    each global batch.

    The last batch of an epoch is as short as what is left. Parts differ by one sample at most,
    unless `shares` says one whole number for each coordinate. With fewer samples than ranks some
    parts have none: tensors of the right shape with a first dim of 0. `workers` threads read ahead,
    without a difference in what is yielded.
    """

    def __init__(
        self,
        dataset: SampleSet,
        global_batch: int,
        *,
        dp_size: int = 1,
        dp_rank: int = 0,
        seed: int = 0,
        workers: int = 0,
        shares: Sequence[int] = (),
    ) -> None:
        """Read `dataset` from its first epoch on.

        Args:
            dataset: samples by index, pairs of (input, target).
            global_batch: samples of a batch on all coordinates together.
            dp_size: the number of coordinates.
            dp_rank: this one, from 0.
            seed: of the order of samples.
            workers: threads that read ahead; with 0 the caller reads.
            shares: a whole number for each coordinate, its part of a batch; equal by default.

        Raises:
            DataError: a number that cannot be, or a data set without samples.
        """
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
        self.workers = workers
        self.shares = _checked_shares(shares, dp_size)
        self.epoch = self.position = 0
        self._order = order_of(dataset, seed)
        self._ahead: Iterator[Batch] | None = None
        self._queue: deque[Future[Batch]] = deque()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if not self.workers:
            indices, self.epoch, self.position = self._part(self.epoch, self.position)
            return collate(self.dataset, indices)
        if self._ahead is None:
            self._queue = deque()
            self._ahead = read_ahead(self.dataset, self._parts(), self.workers, self._queue)
        batch = next(self._ahead)
        self.epoch, self.position = self._after(self.epoch, self.position)[0::2]
        return batch

    @property
    def is_ready(self) -> bool:
        """Whether the next batch has been read already."""
        return self._ahead is not None and bool(self._queue) and self._queue[0].done()

    @property
    def samples_per_epoch(self) -> int:
        """Samples in an epoch; a set that draws has one epoch that does not end."""
        return self._order.num_samples

    @property
    def batches_per_epoch(self) -> int:
        """Batches in an epoch that is read from its beginning, a short last one included."""
        return -(-len(self.dataset) // self.global_batch)

    def skip(self, num_batches: int) -> None:
        """Move to where a new stream is after that many batches."""
        batches_per_epoch = -(-self._order.num_samples // self.global_batch)
        epoch, index = divmod(num_batches, batches_per_epoch)
        self._move(epoch, index * self.global_batch)

    def _move(self, epoch: int, position: int) -> None:
        """Go to a place; what was read ahead from another one is dropped."""
        self.epoch = epoch
        self.position = position
        self._ahead = None

    def _after(self, epoch: int, position: int) -> tuple[int, int, int]:
        """The next global batch behind a place: its epoch, and where it starts and stops."""
        if position >= self._order.num_samples:
            epoch, position = epoch + 1, 0
        return epoch, position, min(position + self.global_batch, self._order.num_samples)

    def _part(self, epoch: int, position: int) -> tuple[Tensor, int, int]:
        """This coordinate's indices in the next global batch, and the place behind it."""
        epoch, start, stop = self._after(epoch, position)
        first, last = bounds(stop - start, self.shares, self.dp_rank)
        return self._order.at(epoch, start + first, start + last), epoch, stop

    def _parts(self) -> Iterator[Tensor]:
        """This coordinate's indices in every global batch from here on."""
        epoch, position = self.epoch, self.position
        while True:
            indices, epoch, position = self._part(epoch, position)
            yield indices

    def state_dict(self) -> dict[str, int]:
        """Where the stream is, and of what."""
        state = {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "num_samples": len(self.dataset),
        }
        content = getattr(self.dataset, "content", None)
        return state if content is None else {**state, "content": content}

    def load_state_dict(self, state: Mapping[str, int], num_batches: int | None = None) -> None:
        """Go on from `state`, under any number of ranks; `num_batches` is how many had been read.

        Raises `DataError` if the stream is another one, or the place none that a stream can be at.
        """
        place = self.state_dict()
        for key in place:
            if key == "content" and isinstance(state, Mapping) and key not in state:
                continue  # saved before this kind of data had one
            value = state.get(key) if isinstance(state, Mapping) else None
            if not isinstance(value, int) or isinstance(value, bool):
                raise DataError(f"the data's saved place says {key} = {value!r}, no whole number")
        for key, cure in SAME_ORDER.items():
            if state[key] != place[key]:
                raise DataError(
                    f"the data was saved with {key} = {state[key]} and now has {place[key]}: its "
                    f"order would differ; {cure}"
                )
        if "content" in state and state["content"] != place.get("content"):
            raise DataError(
                "the data have other tokens than those that the saved place is in: the files, the "
                "tokenizer or a setting has changed, and samples would come twice or never"
            )
        epoch = state["epoch"]
        position = state["position"]
        most = MAX_EPOCHS if num_batches is None else num_batches
        if not (0 <= position <= self._order.num_samples and 0 <= epoch <= most):
            raise DataError(
                f"the data's saved place is sample {position} of epoch {epoch}, and there are "
                f"{self._order.num_samples} samples an epoch and at most {most} epochs read"
            )
        self._move(epoch, position)


class InOrder:
    """Batches of a data set in its order, once: this coordinate's part of each.

    `batches` limits their number; None means the whole set.
    """

    def __init__(
        self,
        dataset: SampleSet,
        global_batch: int,
        *,
        dp_size: int = 1,
        dp_rank: int = 0,
        batches: int | None = None,
        shares: Sequence[int] = (),
    ) -> None:
        self.dataset = dataset
        self.global_batch = global_batch
        self.dp_rank = dp_rank
        self.shares = _checked_shares(shares, dp_size)
        most = len(dataset) if batches is None else batches * global_batch
        self.num_samples = min(len(dataset), most)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, self.num_samples, self.global_batch):
            end = min(begin + self.global_batch, self.num_samples)
            first, last = bounds(end - begin, self.shares, self.dp_rank)
            yield collate(self.dataset, torch.arange(begin + first, begin + last))
