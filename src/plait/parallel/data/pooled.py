"""Gradients that are freed as soon as they are reduced: two buffers for the whole model.

Where ranks read each other's memory, a large bucket goes through them in pieces. The embedding of a
large vocabulary would make buffers of its own size, which nothing else could use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Axis
from plait.parallel.data.bucket import Bucket
from plait.parallel.data.gradients import BucketState, GradientStore

PIECE_BYTES = 8 << 20
"""The most of a bucket that is reduced at once where it goes in pieces."""


@dataclass(frozen=True)
class PooledPiece:
    """A bucket's gradients, or a piece of every rank's shard of them, while they are reduced.

    Attributes:
        state: the bucket.
        start: the element of each shard with which it begins.
        grad: its elements, shard by shard (N * n,) for N shards.
        is_first: whether the step has reduced this bucket for the first time.
    """

    state: BucketState
    start: int
    grad: Tensor
    is_first: bool

    def own(self, rank: int) -> Tensor:
        """The elements (n,) of a rank's shard."""
        return self.grad.view(self.state.bucket.num_shards, -1)[rank]

    def of(self, shard: Tensor) -> Tensor:
        """The elements (n,) of a whole shard (shard_numel,), as a view."""
        numel = self.grad.numel() // self.state.bucket.num_shards
        return shard[self.start : self.start + numel]


Release = Callable[[PooledPiece], None]
"""Finishes the reduction of a piece, whose buffer is wanted for another."""


class PooledGradients(GradientStore):
    """Two buffers for the whole model, used in turn. Gradients are freed when they are reduced.

    Buckets and pieces take turns in one order on every rank, so peers may read each other's buffer
    directly.
    """

    every_backward = True
    num_buffers = 2

    def __init__(
        self,
        states: Sequence[BucketState],
        axis: Axis,
        dtype: torch.dtype,
        device: torch.device,
        release: Release,
    ) -> None:
        """`release` finishes the reduction of a piece."""
        self._paths = axis.paths
        self._piece_bytes = PIECE_BYTES if axis.reads_peers else sys.maxsize
        numel = max((self._numel_at_once(state.bucket, dtype) for state in states), default=0)
        self.buffers = [
            axis.empty(numel, dtype, device).zero_()
            for _ in range(min(self.num_buffers, len(states)))
        ]
        self._finish = release
        self._reduced: set[int] = set()  # buckets that have been reduced in this step
        self._turn = 0
        self._users: list[PooledPiece | None] = [None] * len(self.buffers)

    def _numel_at_once(self, bucket: Bucket, dtype: torch.dtype) -> int:
        """Elements of a bucket that are reduced at once, those of all shards together."""
        num_bytes = bucket.padded_numel * dtype.itemsize
        if not self._paths.beyond("gradient_piece_bytes", num_bytes, self._piece_bytes):
            return bucket.padded_numel
        limit = self._paths.limit("gradient_piece_bytes", self._piece_bytes)
        return max(1, limit // dtype.itemsize // bucket.num_shards) * bucket.num_shards

    def begin_step(self, states: Sequence[BucketState]) -> None:
        self._reduced.clear()

    def take(self, state: BucketState, index: int, param: Tensor) -> None:
        pass  # stays in param.grad until the bucket goes

    def collect(self, state: BucketState) -> None:
        self._place(state, 0, state.bucket.padded_numel)
        assert state.grad is not None
        state.grad[state.bucket.numel :].zero_()
        state.attach(state.grad)
        for index, slot in enumerate(state.bucket.slots):
            if slot.param.grad is not None:
                state.views[index].copy_(slot.param.grad)
                slot.param.grad = None
                state.stale.discard(index)
        state.zero_stale()

    def is_first(self, state: BucketState) -> bool:
        """Whether this step has not reduced the whole of a bucket yet."""
        return state.index not in self._reduced

    def goes_in_pieces(self, bucket: Bucket) -> bool:
        """Whether a bucket is larger than a buffer."""
        return bucket.padded_numel > self.buffers[0].numel()

    def pieces(self, state: BucketState) -> Iterator[None]:
        bucket = state.bucket
        if not self.goes_in_pieces(bucket):
            self.collect(state)
            yield
        else:
            length = self.buffers[0].numel() // bucket.num_shards
            for start in range(0, bucket.shard_numel, length):
                stop = min(start + length, bucket.shard_numel)
                self._place(state, start, (stop - start) * bucket.num_shards)
                self._fill(state, start, stop)
                yield
            for slot in bucket.slots:
                slot.param.grad = None
        self._reduced.add(state.index)

    def _place(self, state: BucketState, start: int, numel: int) -> None:
        """Give the next `numel` elements of a bucket the buffer whose turn it is."""
        previous = self._users[self._turn]
        if previous is not None:
            self._release(previous)
        grad = self.buffers[self._turn][:numel]
        self._users[self._turn] = PooledPiece(state, start, grad, self.is_first(state))
        self._turn = (self._turn + 1) % len(self.buffers)
        state.grad, state.start = grad, start

    def _fill(self, state: BucketState, start: int, stop: int) -> None:
        """Copy the elements [start, stop) of every rank's shard; those without a gradient are
        zero.
        """
        assert state.grad is not None
        bucket = state.bucket
        for shard, row in enumerate(state.grad.view(bucket.num_shards, -1)):
            first = shard * bucket.shard_numel
            filled = 0
            for part in bucket.parts(first + start, first + stop):
                grad = part.slot.param.grad
                into = row[part.offset : part.offset + part.numel]
                if grad is None:
                    into.zero_()
                else:
                    into.copy_(grad.reshape(-1)[part.start : part.stop])
                filled = part.offset + part.numel
            row[filled:].zero_()

    def after_backward(self) -> None:
        """Release what still uses a buffer, oldest first."""
        for turn in range(self._turn, self._turn + len(self.buffers)):
            user = self._users[turn % len(self.buffers)]
            if user is not None:
                self._release(user)
        self._users = [None] * len(self.buffers)
        self._turn = 0

    def _release(self, piece: PooledPiece) -> None:
        self._finish(piece)
        piece.state.detach()
