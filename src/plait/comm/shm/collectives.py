"""Collectives of ranks that read each other's memory: nothing is sent, everyone takes what it
needs.

In a reduce-scatter each rank sums its own range over the memory of all. In an all-gather it copies
the others' shards. An all-reduce is the first, then the second, in place. Sums run in the order of
coordinates with the same rounding on every path. Each element is summed by one rank (or by all
alike), so all ranks get equal bits.

Why the in-place forms do not race: between two signals a rank writes only its own range of its
memory. The others read only other ranges of it. For reduce_scatter with `out` in `full`, no other
rank reads this rank's slice of its `full`. For all_gather with `shard` in `full`, others read this
rank's slice and it writes the rest. For all_reduce, the phases swap: first others read all but its
range, which it writes. Then they read its range, and it writes the rest.

Tensors outside readable memory are copied into borrowed memory first; then none waits for the
readers.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from plait.comm.backends.base import Backend, Exposed, Handle
from plait.comm.shm.fabric import RING, Fabric, Signal
from plait.comm.shm.mailbox import Mailbox
from plait.comm.shm.participant import Endpoint, Participant
from plait.comm.shm.progress import ProgressEngine
from plait.mesh.slices import shard_range
from plait.paths import Paths

# Up to here every rank sums everything: one signal less, and the data lie in cache.
ONE_SHOT_BYTES = 256 << 10


class Direct(Backend):
    """All operations, on a `Fabric`."""

    says_waits = True

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.rank = fabric.rank
        self.size = fabric.size
        self._mail = Mailbox(fabric)
        self._all = tuple(range(self.size))
        self._others = tuple(peer for peer in self._all if peer != self.rank)
        self._endpoint = Endpoint(fabric, ProgressEngine(fabric), self._others)

    def follow(self, paths: Paths) -> None:
        """Follow other paths, as the memory of this axis does."""
        super().follow(paths)
        self.fabric.follow(paths)

    def _is_large(self, flat: Tensor) -> bool:
        return self.paths.beyond("all_reduce_bytes", flat.nbytes, ONE_SHOT_BYTES)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Small: everyone sums everything. Large: each sums its range, then copies the others'."""
        flat = tensor.view(-1)
        if not self._is_large(flat) or not self.fabric.readable(flat):
            return self.all_reduce_into(flat, flat)
        side = Participant(self._endpoint, "all_reduce", flat)
        ranges = [shard_range(flat.numel(), self.size, peer) for peer in self._all]

        def sum_own() -> None:
            start, stop = ranges[self.rank]
            self.sum_into(
                side.source[start:stop], [side.of(peer)[start:stop] for peer in self._all]
            )

        def copy_others() -> None:
            for peer, (start, stop) in enumerate(ranges):
                if peer != self.rank:
                    flat[start:stop].copy_(side.of(peer)[start:stop])

        return side.collective(sum_own, copy_others)

    def all_reduce_into(self, out: Tensor, source: Tensor) -> Handle:
        """From borrowed memory, so that the sum may go elsewhere: of two ranks, everyone sums
        everything, whatever the size.
        """
        flat = out.view(-1)
        side = Participant(self._endpoint, "all_reduce", source, always_stage=True)
        if self.size == 2 or not self._is_large(flat):
            return side.collective(
                lambda: self.sum_into(flat, [side.of(peer) for peer in self._all])
            )
        ranges = [shard_range(flat.numel(), self.size, peer) for peer in self._all]

        def sum_own() -> None:
            start, stop = ranges[self.rank]
            self.sum_into(
                side.source[start:stop], [side.of(peer)[start:stop] for peer in self._all]
            )

        def copy_all() -> None:
            for peer, (start, stop) in enumerate(ranges):
                flat[start:stop].copy_(side.of(peer)[start:stop])

        return side.collective(sum_own, copy_all)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Handle:
        """Sum this rank's range over the memory of all."""
        side = Participant(self._endpoint, "reduce_scatter", full)
        numel = out.numel()
        own = slice(self.rank * numel, (self.rank + 1) * numel)
        return side.collective(
            lambda: self.sum_into(out, [side.of(peer)[own] for peer in self._all])
        )

    def reduce_scatter_strided(self, out: Tensor, parts: Tensor) -> Handle:
        """Parts that were not written where the others read them become contiguous there."""
        borrowed = self._endpoint.borrowed.get(parts.data_ptr())
        if borrowed is None or parts.is_contiguous():
            flat = out.view(-1)
            numel = out.numel()
            side = Participant(self._endpoint, "reduce_scatter", parts)
            own = slice(self.rank * numel, (self.rank + 1) * numel)
            return side.collective(
                lambda: self.sum_into(flat, [side.of(peer)[own] for peer in self._all])
            )
        side = Participant(self._endpoint, "reduce_scatter", borrowed.tensor)

        def sum_own() -> None:
            rows = [
                side.of(peer).as_strided(parts.shape, parts.stride())[self.rank]
                for peer in self._all
            ]
            if self.size == 2:
                torch.add(rows[0], rows[1], out=out)
                return
            for index, piece in enumerate(out):
                self.sum_into(piece.view(-1), [row[index].reshape(-1) for row in rows])

        return side.collective(sum_own)

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """Copy the shards of all."""
        return self.all_gather_strided(full.view(self.size, -1), shard)

    def all_gather_strided(self, parts: Tensor, shard: Tensor) -> Handle:
        """Copy the shards of all to wherever they go."""
        side = Participant(self._endpoint, "all_gather", shard)
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)

        def copy() -> None:
            for peer in self._others:
                parts[peer].copy_(side.of(peer).view(parts.shape[1:]))

        return side.collective(copy)

    def all_to_all(
        self, out: Tensor, source: Tensor, out_splits: list[int], source_splits: list[int]
    ) -> Handle:
        """Copy this rank's part of every source; the header says where each part begins."""
        row = out.numel() // out.shape[0] if out.shape[0] else 0
        source_row = source.numel() // source.shape[0] if source.shape[0] else 0
        offsets = tuple(accumulate((rows * source_row for rows in source_splits), initial=0))
        side = Participant(
            self._endpoint, "all_to_all", source.view(-1), offsets=offsets, same_numel=False
        )
        flat = out.view(-1)
        starts = list(accumulate((rows * row for rows in out_splits), initial=0))

        def copy() -> None:
            for peer in self._all:
                begin, end = side.notice_of(peer).offsets[self.rank : self.rank + 2]
                side.check_part(peer, end - begin, starts[peer + 1] - starts[peer])
                flat[starts[peer] : starts[peer + 1]].copy_(side.of(peer)[begin:end])

        return side.collective(copy)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """Everyone copies from the root."""
        flat = tensor.view(-1)
        if self.rank == root:
            return Participant(self._endpoint, "broadcast", flat).give(self._others)
        side = Participant(self._endpoint, "broadcast", flat, publish=False)
        return side.take((root,), lambda: flat.copy_(side.of(root)))

    def reduce(self, tensor: Tensor, root: int) -> Handle:
        """The root sums the memory of all."""
        flat = tensor.view(-1)
        if self.rank != root:
            return Participant(self._endpoint, "reduce", flat).give((root,))
        side = Participant(self._endpoint, "reduce", flat, publish=False)
        return side.take(
            self._others, lambda: self.sum_into(flat, [side.of(peer) for peer in self._all])
        )

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        """Buffered: done when it returns."""
        return self._mail.send(tensor, to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Handle:
        """Matched by order and tag."""
        return self._mail.receive(tensor, source, tag)

    def exchange(self, out: Tensor, tensor: Tensor, to: int, source: int) -> Handle:
        """Copy from `source`, let `to` copy; all ranks of the axis call it together."""
        side = Participant(self._endpoint, "shift", tensor.view(-1))
        return side.swap((to,), (source,), lambda: out.view(-1).copy_(side.of(source)))

    def exchange_and_add(
        self, out: Tensor, parts: Tensor, peers: Sequence[tuple[int, int]]
    ) -> Handle:
        """Add the others' parts up where they lie. Over when this rank's have been read, so that no
        rank lends more and more.
        """
        side = Participant(self._endpoint, "shift", parts)
        flat = out.view(-1)
        to, sources = zip(*peers, strict=True)

        def add() -> None:
            rows = [
                side.of(source).view(len(peers), -1)[index] for index, source in enumerate(sources)
            ]
            self.sum_into(flat, [flat, *rows])

        return side.swap(to, sources, add, early=False)

    @property
    def can_expose(self) -> bool:
        """Whether ranks may read each other's tensors in place. There may be at most half as many
        as operations under way; readers may issue one a rank meanwhile.
        """
        return self.size <= RING // 2

    def expose(self, tensor: Tensor) -> Exposed:
        """Once for all; everyone reads at its own pace."""
        return _ExposedBuffer(self._endpoint, tensor)

    def barrier(self) -> None:
        """Everyone has arrived."""
        Participant(self._endpoint, "barrier", torch.empty(0)).collective(lambda: None).wait()

    def gather_objects(self, item: object) -> list[Any]:
        """Pickled bytes, each rank's of its own length: between the ranks of one run, never
        from outside.
        """
        packed = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        side = Participant(self._endpoint, "gather_objects", packed, same_numel=False)
        items: list[Any] = []
        side.collective(
            lambda: items.extend(
                pickle.loads(side.of(peer).numpy().tobytes()) for peer in self._all
            )
        ).wait()
        return items

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that peers read where it lies."""
        return self.fabric.empty(numel, dtype)

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Out of the staging memory."""
        staged = self.fabric.stage(numel, dtype)
        self._endpoint.borrowed[staged.tensor.data_ptr()] = staged
        return staged.tensor

    def close(self) -> None:
        """Leave."""
        self.fabric.close()


class _ExposedBuffer(Exposed):
    """Tensors that lie still while the ranks look at each other's, at their own pace."""

    def __init__(self, endpoint: Endpoint, tensor: Tensor) -> None:
        self._shape = tensor.shape
        self._endpoint = endpoint
        self._side = Participant(self._endpoint, "show", tensor, always_stage=True)
        self._operation = self._side.exhibit()

    def wait(self) -> None:
        self._operation.wait()

    def advance(self) -> None:
        self._operation.advance()

    def of(self, peer: int) -> Tensor:
        return self._side.of(peer).view(self._shape)

    def leave(self) -> None:
        self._endpoint.fabric.post(Signal.LEFT, *self._endpoint.others)
