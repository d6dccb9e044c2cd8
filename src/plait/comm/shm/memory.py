"""Memory that the ranks of one host read from each other: anonymous files (memfd), mapped by all
who need them.

Files are anonymous rather than named in /dev/shm. They vanish with the last process that maps them,
and the size limit of containers on /dev/shm does not bind them. A peer opens one as /proc/PID/fd/N
at first sight.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from plait.comm.severance import Severance
from plait.comm.shm.fabric import Staged
from plait.paths import Paths
from plait.uncopied import Uncopied

ALIGNMENT = 64
MOST_VIEWS = 4096
ARENA_BYTES = (
    4 << 20
)  # smaller pieces share a segment, so that many of them do not need many file descriptors


class Location(NamedTuple):
    """Where a tensor begins: byte `offset` of segment `number` of some rank; `num_bytes` is of the
    whole segment.
    """

    number: int
    descriptor: int
    num_bytes: int
    offset: int


@dataclass
class Segment:
    """One anonymous file, mapped. It lives as long as its mapping, which every tensor on it
    holds.
    """

    number: int
    descriptor: int
    num_bytes: int
    mapping: weakref.ref[mmap.mmap]
    base: int = 0


@dataclass
class _Arena:
    mapping: mmap.mmap
    num_bytes: int
    used: int = 0
    segment: Segment = field(kw_only=True)


class MappedMemory(Uncopied):
    """The readable memory of one rank, and its view of that of its peers. All axes of a world share
    it.
    """

    def __init__(self, severance: Severance | None = None) -> None:
        self._paths = Paths()
        self.severance = severance or Severance()
        self._bases: list[int] = []  # sorted; the keys of _segments
        self._segments: dict[int, Segment] = {}
        self._next_number = 0
        self._arena: _Arena | None = None
        self._peers: dict[tuple[int, int], Tensor] = {}
        self._views: dict[
            tuple[int, int, int, torch.dtype, int], Tensor
        ] = {}  # of them: what one step saw the next will see

    def follow(self, paths: Paths) -> None:
        """New memory is a piece of a segment, or one of its own, as `paths` says."""
        self._paths = paths

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised (numel,) that `place` finds again; freed with the last tensor on it."""
        num_bytes = max(numel, 1) * dtype.itemsize
        if self._paths.beyond("memory_piece_bytes", num_bytes, ARENA_BYTES // 4):
            mapping, _ = self._map(num_bytes)
            return torch.frombuffer(mapping, dtype=dtype, count=max(numel, 1))[:numel]
        arena = self._arena
        if arena is None or arena.used + num_bytes > arena.num_bytes:
            mapping, segment = self._map(ARENA_BYTES)
            arena = self._arena = _Arena(mapping, ARENA_BYTES, segment=segment)
        start = arena.used
        arena.used = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
        return torch.frombuffer(arena.mapping, dtype=dtype, offset=start, count=max(numel, 1))[
            :numel
        ]

    def place(self, tensor: Tensor) -> Location | None:
        """The place of a contiguous tensor [...], or None if it is not in readable memory."""
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._bases, address) - 1
        if index < 0 or tensor.device.type != "cpu":
            return None
        segment = self._segments[self._bases[index]]
        offset = address - segment.base
        if offset + tensor.numel() * tensor.element_size() > segment.num_bytes:
            return None
        return Location(segment.number, segment.descriptor, segment.num_bytes, offset)

    def peer(self, pid: int, place: Location, dtype: torch.dtype, numel: int) -> Tensor:
        """The tensor (numel,) that lies at a place of the process `pid`, as it is there now.

        Raises:
            OSError: the process is gone, or may not be read.
        """
        seen = (pid, place.number, place.offset, dtype, numel)
        view = self._views.get(seen)
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            view = self._views[seen] = self._view(pid, place, dtype, numel)
        return view

    def _view(self, pid: int, place: Location, dtype: torch.dtype, numel: int) -> Tensor:
        key = (pid, place.number)
        if key not in self._peers:
            path = Path(f"/proc/{pid}/fd/{place.descriptor}")
            # raises OSError, where torch raises RuntimeError; torch keeps no descriptor, where mmap
            # does
            path.stat()
            self._peers[key] = torch.from_file(
                str(path), shared=True, size=place.num_bytes, dtype=torch.uint8
            )
        whole = self._peers[key]
        return whole[place.offset : place.offset + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Unmap the peers'; this rank's segments end with their tensors."""
        self._views.clear()
        self._peers.clear()
        self._arena = None

    def _map(self, num_bytes: int) -> tuple[mmap.mmap, Segment]:
        descriptor = os.memfd_create("plait", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        mapping = mmap.mmap(descriptor, num_bytes)
        base = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        segment = Segment(self._next_number, descriptor, num_bytes, weakref.ref(mapping), base)
        self._next_number += 1
        if base not in self._segments:
            bisect.insort(self._bases, base)
        self._segments[base] = segment
        weakref.finalize(mapping, self._unmap, base, descriptor)
        return mapping, segment

    def _unmap(self, base: int, descriptor: int) -> None:
        """Forget a segment, unless another thread got one at its address before this was told."""
        segment = self._segments.get(base)
        if segment is not None and segment.descriptor == descriptor:
            del self._segments[base]
            self._bases.remove(base)
        os.close(descriptor)


class LockedMemory(MappedMemory):
    """Memory that one thread allocates while another stages in it."""

    def __init__(self, severance: Severance | None = None) -> None:
        super().__init__(severance)
        self._lock = threading.RLock()  # what ends with a tensor is unmapped at any moment

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised (numel,) that `place` finds again."""
        with self._lock:
            return super().empty(numel, dtype)

    def place(self, tensor: Tensor) -> Location | None:
        """The place of a contiguous tensor [...], or None if it is not in readable memory."""
        with self._lock:
            return super().place(tensor)

    def _unmap(self, base: int, descriptor: int) -> None:
        with self._lock:
            super()._unmap(base, descriptor)


class _Block(Staged):
    def __init__(self, block: Tensor, numel: int, dtype: torch.dtype, free: list[Tensor]) -> None:
        self._block = block
        self._free = free
        self.tensor = block[: numel * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Back to the list it came from."""
        self._free.append(self._block)


class Staging:
    """Readable memory to borrow, in blocks of powers of two. The last returned is lent first,
    because it is still in the cache.

    Blocks are kept: what one step needed the next will need again, and peers have them mapped.
    """

    def __init__(self, memory: MappedMemory) -> None:
        self._memory = memory
        self._free: dict[int, list[Tensor]] = {}

    def borrow(self, numel: int, dtype: torch.dtype) -> Staged:
        """A block of at least (numel,), until it is released."""
        num_bytes = max(4096, 1 << (numel * dtype.itemsize - 1).bit_length()) if numel else 4096
        free = self._free.setdefault(num_bytes, [])
        block = free.pop() if free else self._memory.empty(num_bytes, torch.uint8)
        return _Block(block, numel, dtype, free)
