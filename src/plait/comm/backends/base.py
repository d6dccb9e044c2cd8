"""The interface of a backend to an axis: the operations of one line of ranks, unchecked and
uncounted.

The door (`comm.axis.Axis`) checks, counts and times; a backend only moves bytes. Ranks
are coordinates on the line, and there are two at least. Tensors are contiguous unless a method says
otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from plait.comm.backends.sums import sum_into
from plait.paths import Paths
from plait.uncopied import Uncopied


class Handle(ABC):
    """An operation under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the result is there and every tensor that was given may be written again."""

    def advance(self) -> None:  # noqa: B027
        """Do what can be done before `wait`; `wait_all` calls it for every operation first. Nothing
        by default.
        """


class Done(Handle):
    """An operation that was complete when it returned."""

    def wait(self) -> None:
        """Nothing is left."""


class Then(Handle):
    """Waits for some torch works, then runs a last local step once."""

    def __init__(self, works: Sequence[Any], last: Callable[[], object] | None = None) -> None:
        self._works = works
        self._last = last

    def wait(self) -> None:
        """Wait for each work in turn, then do the last step."""
        works = self._works
        self._works = ()
        for work in works:
            work.wait()
        if self._last is not None:
            last = self._last
            self._last = None
            last()


class Exposed(Handle):
    """A buffer of every rank that all ranks read, once it is waited for, until this rank leaves."""

    @abstractmethod
    def of(self, peer: int) -> Tensor:
        """The tensor of a rank [...], of the shape that was exposed, where it lies: to be read
        only.
        """

    @abstractmethod
    def leave(self) -> None:
        """This rank reads nothing of it any more."""


class Backend(Uncopied, ABC):
    """The operations of one line of ranks. `rank` is this rank's coordinate, `size` (N) the number
    of ranks.

    Shapes: n elements are one rank's part, N * n the whole. `[...]` is any shape, alike on all
    ranks. All but `send` and `receive` are collective, and every tensor of a call has one dtype.
    """

    rank: int
    size: int
    says_waits = False
    """Whether it tells by itself that it waits for long, and for whom."""

    @cached_property
    def paths(self) -> Paths:
        """Which ways operations take by the size of what is at hand."""
        return Paths()

    def follow(self, paths: Paths) -> None:
        """Take the ways that `paths` says, and note them there."""
        self.paths = paths

    def sum_into(self, out: Tensor, rows: Sequence[Tensor]) -> None:
        """Add `rows`, tensors (n,), into `out` (n,), as `sums.sum_into` does."""
        sum_into(out, rows, self.paths)

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum `tensor` [...] in place."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, full: Tensor) -> Handle:
        """`out` (n,) becomes this rank's part of the sum of `full` (N * n,); it may be that part of
        `full` itself.
        """

    @abstractmethod
    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """`full` (N * n,) becomes all shards (n,) in order; `shard` may be this rank's part of
        `full` itself.
        """

    def all_reduce_into(self, out: Tensor, source: Tensor) -> Handle:
        """`out` [...] becomes the sum of `source`, of the same shape and any strides, which stays
        as it is.

        Every rank waits for it before it does anything else with this line.
        """
        out.copy_(source)
        return self.all_reduce(out)

    def all_gather_strided(self, parts: Tensor, shard: Tensor) -> Handle:
        """`parts[k]` becomes the shard of rank k: `parts` (N, ...), `shard` (...), both of any
        strides.
        """
        full = torch.empty_like(parts, memory_format=torch.contiguous_format)
        handle = self.all_gather(full.view(-1), shard.reshape(-1))
        return Then([handle], lambda: parts.copy_(full))

    def reduce_scatter_strided(self, out: Tensor, parts: Tensor) -> Handle:
        """`out` (...), contiguous, becomes the sum of every rank's `parts[rank]`: `parts` (N, ...)
        of any strides.
        """
        return self.reduce_scatter(out.view(-1), parts.reshape(-1))

    @abstractmethod
    def all_to_all(
        self, out: Tensor, source: Tensor, out_splits: list[int], source_splits: list[int]
    ) -> Handle:
        """Rows (of dimension 0) by splits, in the order of coordinates.

        `source` (sum of source_splits, ...) goes, `source_splits[k]` rows to rank k; `out` (sum of
        out_splits, ...) is filled by `out_splits[k]` rows of rank k.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """The tensor [...] of `root`, everywhere, in place."""

    @abstractmethod
    def reduce(self, tensor: Tensor, root: int) -> Handle:
        """The sum of `tensor` [...], in place at `root`. The contents on other ranks are undefined
        afterwards.
        """

    @abstractmethod
    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        """Send `tensor` [...] to one rank; matched with `receive` in order of issue, for each pair
        of ranks and tag.
        """

    @abstractmethod
    def receive(self, tensor: Tensor, source: int, tag: int) -> Handle:
        """Fill `tensor` [...] from one rank."""

    @abstractmethod
    def exchange(self, out: Tensor, tensor: Tensor, to: int, source: int) -> Handle:
        """Send `tensor` [...] to one rank and receive `out` [...] from another at once."""

    def exchange_and_add(
        self, out: Tensor, parts: Tensor, peers: Sequence[tuple[int, int]]
    ) -> Handle:
        """Send `parts[i]` to the first of `peers[i]`, add what comes from the second to `out`.

        `out` is [...], `parts` (len(peers), ...); both are contiguous. All ranks call it together.
        """
        taken = torch.empty_like(parts)
        works = [
            self.exchange(into, part, *pair)
            for into, part, pair in zip(taken, parts, peers, strict=True)
        ]
        return Then(works, lambda: self.sum_into(out.view(-1), [out.view(-1), *taken.flatten(1)]))

    @property
    def can_expose(self) -> bool:
        """Whether ranks can read each other's memory where it lies."""
        return False

    def expose(self, tensor: Tensor) -> Exposed:
        """Let every rank read this rank's `tensor` [...], and read theirs, of the same shape; only
        where `can_expose`.
        """
        raise NotImplementedError

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def gather_objects(self, item: object) -> list[Any]:
        """Small picklable things of all ranks, in order: for control, not for data."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory (numel,), such that operations on it are as fast as this backend can
        make them.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory (numel,) to write what one operation sends, which gives it back."""
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """Give back what the backend owns."""
