"""A backend that copies what it is given, and what comes of it, into a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.comm import World
from plait.comm.backends.base import Backend, Handle
from plait.explain.notebook import Notebook, NotedLedger
from plait.paths import Paths

SUMS = ("reduce", "all_reduce", "reduce_scatter")


class _NotedHandle(Handle):
    def __init__(self, inner: Handle, last: Callable[[], None]) -> None:
        self._inner = inner
        self._last = last

    def advance(self) -> None:
        self._inner.advance()

    def wait(self) -> None:
        self._inner.wait()
        self._last()
        self._last = lambda: None


class NotedBackend(Backend):
    """A backend whose operands and results are copied into a notebook."""

    def __init__(self, inner: Backend, notebook: Notebook) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._notebook = notebook

    def follow(self, paths: Paths) -> None:
        """Take the ways that `paths` says."""
        super().follow(paths)
        self._inner.follow(paths)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum in place."""
        return self._noted(tensor, tensor, lambda: self._inner.all_reduce(tensor))

    def all_reduce_into(self, out: Tensor, source: Tensor) -> Handle:
        """The sum, in other memory."""
        return self._noted(source, out, lambda: self._inner.all_reduce_into(out, source))

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Handle:
        """This rank's part of the sum."""
        return self._noted(full, out, lambda: self._inner.reduce_scatter(out, full))

    def reduce_scatter_strided(self, out: Tensor, parts: Tensor) -> Handle:
        """This rank's part of the sum, of any strides."""
        return self._noted(parts, out, lambda: self._inner.reduce_scatter_strided(out, parts))

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """All shards."""
        return self._noted(shard, full, lambda: self._inner.all_gather(full, shard))

    def all_gather_strided(self, parts: Tensor, shard: Tensor) -> Handle:
        """All shards, of any strides."""
        return self._noted(shard, parts, lambda: self._inner.all_gather_strided(parts, shard))

    def all_to_all(
        self, out: Tensor, source: Tensor, out_splits: list[int], source_splits: list[int]
    ) -> Handle:
        """Rows by splits."""
        start = lambda: self._inner.all_to_all(out, source, out_splits, source_splits)  # noqa: E731
        return self._noted(source, out, start)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """The tensor of the root."""
        self._root(root)
        operand = tensor if root == self.rank else None
        return self._noted(operand, tensor, lambda: self._inner.broadcast(tensor, root))

    def reduce(self, tensor: Tensor, root: int) -> Handle:
        """The sum at the root."""
        self._root(root)
        result = tensor if root == self.rank else None
        return self._noted(tensor, result, lambda: self._inner.reduce(tensor, root))

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        """To one rank."""
        return self._noted(tensor, None, lambda: self._inner.send(tensor, to, tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Handle:
        """From one rank."""
        return self._noted(None, tensor, lambda: self._inner.receive(tensor, source, tag))

    def exchange(self, out: Tensor, tensor: Tensor, to: int, source: int) -> Handle:
        """Send to one rank, receive from another."""
        self._root(to)
        return self._noted(tensor, out, lambda: self._inner.exchange(out, tensor, to, source))

    def exchange_and_add(
        self, out: Tensor, parts: Tensor, peers: Sequence[tuple[int, int]]
    ) -> Handle:
        """Send parts, add what comes."""
        start = lambda: self._inner.exchange_and_add(out, parts, peers)  # noqa: E731
        return self._noted(parts, out, start)

    def barrier(self) -> None:
        """Wait for all."""
        self._inner.barrier()

    def gather_objects(self, item: object) -> list[Any]:
        """Control."""
        return self._inner.gather_objects(item)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the backend."""
        return self._inner.empty(numel, dtype, device)

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the backend."""
        return self._inner.borrow(numel, dtype, device)

    def close(self) -> None:
        """Close the backend."""
        self._inner.close()

    def _root(self, coordinate: int) -> None:
        note = self._notebook.last
        note.peer = note.ranks[coordinate]

    def _noted(
        self, operand: Tensor | None, result: Tensor | None, start: Callable[[], Handle]
    ) -> Handle:
        notebook = self._notebook
        note = notebook.last
        if operand is not None:
            # A summand is never the model's input, though its values may be by chance.
            see = notebook.noted if note.operation in SUMS else notebook.given
            note.operands = [see(operand)]
        handle = start()

        def last() -> None:
            if result is not None:
                note.results = [notebook.noted(result)]

        return _NotedHandle(handle, last)


def notebook_of(world: World) -> Notebook:
    """The notebook of a rank's world."""
    flight = world.recorder.flight
    assert isinstance(flight, Notebook)
    return flight


def note_world(world: World) -> Notebook:
    """Give a world a notebook, before any of its axes exists."""
    notebook = Notebook(world)
    world.recorder.note_by(notebook, NotedLedger(notebook))
    return notebook


def wrapped(world: World, backend: Backend) -> Backend:
    """A backend whose calls are noted."""
    return NotedBackend(backend, notebook_of(world))
