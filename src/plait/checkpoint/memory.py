"""A checkpoint in memory: each rank's shards in a file that has no name, read like one on a disk.

A file is written again and again, so its head says whether it is whole, and it has no checksums.
Its list of shards changes rarely, and is then written again; the meta data changes at each step.

    head (`snapshot_head`) | values, each aligned | list of shards (JSON) | meta data (JSON)
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.agreement import agree
from plait.checkpoint.entry import RANK_PREFIX, entry_of
from plait.checkpoint.read import Checkpoint
from plait.checkpoint.room import Room, copy_values
from plait.comm.shm.snapshot_head import NOTHING, Head
from plait.errors import CheckpointError
from plait.mesh import Shard
from plait.values import JsonMapping, JsonObject

ALIGNMENT = 64
ROOM_BYTES = 1 << 16
Entry = JsonObject


class MemoryFile:
    """One rank's file for snapshots, mapped for writing.

    What lies on a device comes by way of a `room`, which files that take turns share. Where the
    driver pins the file's memory it comes into the file itself, and is whole once it has come.

    Attributes:
        num_bytes: of the shards that were written last.
    """

    def __init__(self, path: Path, room: Room | None = None) -> None:
        self.num_bytes = 0
        self._path = path
        self._room = room
        self._unpin: Callable[[], object] | None = None
        self._map: mmap.mmap | None = None
        self._held: list[Shard] = []
        self._entries: list[Entry] = []
        self._views: list[Tensor] = []
        self._list_place = 0
        self._list_bytes = 0

    def content(self) -> Tensor:
        """The bytes (num_bytes,) of the file, uint8, as far as it is written: a view of the map."""
        assert self._map is not None
        head = Head.read(self._map)
        end = head.list_place + head.list_bytes + head.meta_bytes
        return torch.frombuffer(self._map, dtype=torch.uint8, count=end)

    def write(self, step: int, shards: Iterable[Shard], meta: JsonMapping) -> None:
        """Write the shards of a step over what the file holds."""
        self.begin(step, shards, meta)()

    def begin(self, step: int, shards: Iterable[Shard], meta: JsonMapping) -> Callable[[], None]:
        """Prepare to write the shards of a step; the answer writes them, in any thread.

        What the calling thread has asked a device for until now is written, and nothing later. The
        file counts as empty until that is done.
        """
        held = list(shards)
        entries = self._entries_of(held)
        text = json.dumps(dict(meta)).encode()
        if self._map is not None:
            Head(NOTHING).write(self._map)
        if entries != self._entries or not self._has_room(len(text)):
            self._lay_out(entries, len(text))
        self._held = held
        self._entries = entries
        if self._room is not None:
            self._room.mark()
        return partial(self._finish, step, text)

    def _copy_values(self) -> None:
        """Copy the shards' values into the map, and wait for those that lie on a device.

        To ask a device for hundreds of copies takes the time of a small step. So the thread of the
        steps does not ask.
        """
        values = [shard.values for shard in self._held]
        if self._room is None:
            copy_values(self._views, values)
        elif self._unpin is not None:
            self._room.copy_into(self._views, values)
        else:
            copy_values(self._views, [copy.values for copy in self._room.copy(self._held)])

    def _entries_of(self, held: Sequence[Shard]) -> list[Entry]:
        """The entries of shards. That of a shard which the file held before is known."""
        if len(held) == len(self._held) and all(map(is_, held, self._held)):
            return self._entries
        known = {id(shard): entry for shard, entry in zip(self._held, self._entries, strict=True)}
        return [known.get(id(shard)) or entry_of(shard) for shard in held]

    def _finish(self, step: int, text: bytes) -> None:
        """Copy the values, then write the meta data; the head comes last."""
        assert self._map is not None
        self._copy_values()
        start = self._list_place + self._list_bytes
        self._map[start : start + len(text)] = text
        head = Head(step, self._list_place, self._list_bytes, len(text))
        head.write(self._map)

    def _has_room(self, meta_bytes: int) -> bool:
        end = self._list_place + self._list_bytes + meta_bytes
        return self._map is not None and end <= len(self._map)

    def _lay_out(self, entries: list[Entry], meta_bytes: int) -> None:
        """Give every shard a place, in a map that is large enough."""
        end = Head.size
        placed = []
        for entry in entries:
            at = -(-end // ALIGNMENT) * ALIGNMENT
            placed.append({**entry, "at": at})
            end = at + (entry["stop"] - entry["start"]) * _dtype(entry).itemsize
        text = json.dumps(placed, separators=(",", ":")).encode()
        if self._unpin is not None:
            self._unpin()
        with self._path.open("r+b") as file:
            size = end + len(text) + meta_bytes + ROOM_BYTES
            os.ftruncate(file.fileno(), size)
            self._map = mmap.mmap(file.fileno(), size)
        self._unpin = self._pinned(self._map)
        Head(NOTHING).write(self._map)
        self._map[end : end + len(text)] = text
        self._list_place = end
        self._list_bytes = len(text)
        self._views = [_values(self._map, entry) for entry in placed]
        self.num_bytes = sum(view.numel() * view.element_size() for view in self._views)

    def _pinned(self, memory: mmap.mmap) -> Callable[[], object] | None:
        """Have the driver pin the map, until this object ends; the answer ends it before."""
        if self._room is None or not has_no_disk(self._path):
            return None
        unpin = self._room.pin(torch.frombuffer(memory, dtype=torch.uint8))
        return None if unpin is None else weakref.finalize(self, unpin)


def has_no_disk(path: Path) -> bool:
    """Whether a file is nothing but memory, as `plait.launcher.board.Files` makes it on Linux."""
    return os.path.realpath(path).startswith("/memfd:")


class MemoryCopy:
    """A copy of another rank's file, as it comes from there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def write(self, content: Tensor) -> None:
        """Write the bytes (num_bytes,) of a whole file, uint8, over what this one holds; the head
        comes last.
        """
        count = content.numel()
        if self._map is None or len(self._map) < count:
            with self._path.open("r+b") as file:
                os.ftruncate(file.fileno(), count + ROOM_BYTES)
                self._map = mmap.mmap(file.fileno(), count + ROOM_BYTES)
        Head(NOTHING).write(self._map)
        head = Head.read(bytes(content[: Head.size].tolist()))
        values = torch.frombuffer(self._map, dtype=torch.uint8, count=count)
        values[Head.size :].copy_(content[Head.size :])
        head.write(self._map)


class _MemoryReader:
    """A file of `MemoryFile`, as `Checkpoint` reads the files of a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.head = Head.read(self._map)
        start = self.head.list_place
        end = start + self.head.list_bytes
        entries: list[Entry] = json.loads(self._map[start:end])
        self.meta: JsonObject = json.loads(self._map[end : end + self.head.meta_bytes])
        self.entries = [one for one in entries if not one["name"].startswith(RANK_PREFIX)]
        self._own = {one["name"]: one for one in entries if one["name"].startswith(RANK_PREFIX)}
        self._by_key = {f"{n:06d}/{one['name']}": one for n, one in enumerate(self.entries)}
        self.metadata = {"pieces": json.dumps(self.entries)}

    def form(self, name: str) -> tuple[torch.dtype, int]:
        """The type and the number of elements of a shard."""
        entry = self._by_key[name]
        return _dtype(entry), entry["stop"] - entry["start"]

    def tensor(self, name: str) -> Tensor:
        """The values of a shard."""
        return _values(self._map, self._by_key[name])

    def check(self, name: str, start: int, stop: int) -> None:
        """Memory has no checksums."""

    def check_all(self) -> None:
        """Memory has no checksums."""

    def of_rank(self, name: str) -> Tensor | None:
        """A tensor that every rank has for itself, flat; None where this one had none."""
        entry = self._own.get(RANK_PREFIX + name)
        return None if entry is None else _values(self._map, entry)


class MemoryCheckpoint(Checkpoint):
    """A snapshot of all ranks, open for loading under any plan."""

    def __init__(self, paths: Sequence[Path]) -> None:
        files = [_MemoryReader(path) for path in paths]
        steps = {file.head.step for file in files}
        if len(steps) != 1 or NOTHING in steps:
            raise CheckpointError(f"the snapshots of the ranks are of the steps {sorted(steps)}")
        index = {
            "meta": files[0].meta,
            "files": [{"name": str(path)} for path in paths],
            "tensors": agree([file.entries for file in files]),
        }
        super().__init__(Path("the snapshot in memory"), index)
        self._readers.update(enumerate(files))
        self._by_rank = files

    @property
    def note(self) -> str | None:
        """Nothing is unknown of a snapshot."""
        return None

    def of_rank(self, rank: int, name: str) -> Tensor | None:
        """A tensor that rank `rank` had for itself, flat; None where it had none."""
        return self._by_rank[rank].of_rank(name)

    def mean_of_ranks(self, name: str) -> Tensor | None:
        """The mean of a tensor over the ranks that had it, flat (numel,); None where none had."""
        known = [file.of_rank(name) for file in self._by_rank]
        values = [value for value in known if value is not None]
        return torch.stack(values).mean(dim=0) if values else None


def _dtype(entry: Entry) -> torch.dtype:
    found: torch.dtype = getattr(torch, entry["dtype"])
    return found


def _values(memory: mmap.mmap, entry: Entry) -> Tensor:
    """The values of a shard, as a view of the map."""
    count = entry["stop"] - entry["start"]
    dtype = _dtype(entry)
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry["at"])
