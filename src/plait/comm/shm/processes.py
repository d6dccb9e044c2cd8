"""The fabric of processes on one host: headers and semaphores in one shared control segment, data
in each rank's memory.

The control segment is made by the first rank of the line. A waiting rank looks every half second
whether the peer still lives. So a death is noticed at once and no rank waits for the dead.

    control: [ semaphores: signal x from x to | headers: rank x RING x words | boxes: from x to x
    RING x words | left: rank | waits: rank ]
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from plait.comm.shm.collectives import Direct
from plait.comm.shm.departure import at_departure
from plait.comm.shm.fabric import DTYPES, RING, Fabric, Header, InboundMessage, Signal, Staged
from plait.comm.shm.memory import Location, MappedMemory, Staging
from plait.comm.shm.semaphores import SEMAPHORE_BYTES, Semaphores, available
from plait.errors import RankFailed
from plait.paths import Paths

CUT_SECONDS = 0.05  # between two looks at whether the world is cut
LOOK_SECONDS = 0.25  # between two looks at the peer
NOTICE_SECONDS = 5.0
OPS = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "shift",
    "show", "barrier",
    "gather_objects",
)  # fmt: skip
_PLAIN_WORDS = (
    8  # number, op, numel, dtype, segment, descriptor, segment bytes, offset; then size + 1 offsets
)
_BOX_WORDS = 8  # full, tag, numel, dtype, segment, descriptor, segment bytes, offset


@dataclass(frozen=True)
class Identity:
    """Which process on which host.

    The boot distinguishes hosts of one name, the namespace containers of one host, the start time
    processes of one id.
    """

    host: str
    namespace: str
    boot: str
    pid: int
    start: str

    @staticmethod
    def own() -> Identity:
        """The identity of this process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        return Identity(
            socket.gethostname(), namespace, boot, os.getpid(), _start_of(os.getpid()) or ""
        )

    def same_host(self, other: Identity) -> bool:
        """Whether both run on one kernel and see each other's process ids."""
        return (self.host, self.namespace, self.boot) == (other.host, other.namespace, other.boot)

    def alive(self) -> bool:
        """Whether the process still runs (a zombie does not)."""
        return _start_of(self.pid) == self.start


def _start_of(pid: int) -> str | None:
    """The start time of a running process, or None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else fields[19]


class Control:
    """The control segment of one line of `size` ranks, made here or mapped from its maker. New
    memory is zero.
    """

    def __init__(self, size: int, whole: Tensor) -> None:
        self.size = size
        self._whole = whole
        parts = whole.split(self._part_bytes(size))
        self.semaphores = Semaphores(whole.data_ptr())
        words = [part.numpy().view(np.int64) for part in parts[1:]]
        self.headers, self.boxes, self.left, self.waits = words
        self.headers = self.headers.reshape(size, RING, -1)
        self.boxes = self.boxes.reshape(size, size, RING, _BOX_WORDS)

    @staticmethod
    def _part_bytes(size: int) -> list[int]:
        notice_words = _PLAIN_WORDS + size + 1
        words = (size * RING * notice_words, size * size * RING * _BOX_WORDS, size, size)
        return [len(Signal) * size * size * SEMAPHORE_BYTES, *(8 * num for num in words)]

    @staticmethod
    def num_bytes(size: int) -> int:
        """Bytes of the control block of `size` ranks."""
        return sum(Control._part_bytes(size))

    @staticmethod
    def create(size: int, memory: MappedMemory) -> Control:
        """Make it; the semaphores are ready when this returns."""
        whole = memory.empty(Control.num_bytes(size), torch.uint8)
        control = Control(size, whole)
        control.semaphores.create(len(Signal) * size * size)
        return control

    def awaited(self, source: int) -> int:
        """The coordinate at the end of the chain of those that wait for one another. In a circle it
        is `source` itself.
        """
        end = source
        for _ in range(self.size):
            if not self.waits[end]:
                return end
            end = int(self.waits[end]) - 1
        return source

    def leave(self, rank: int) -> None:
        """Mark a rank as left: it answers no more."""
        self.left[rank] = 1

    def place(self, memory: MappedMemory) -> Location | None:
        """Where the others find it."""
        return memory.place(self._whole)


@dataclass
class _SlotMessage(InboundMessage):
    fabric: SharedFabric
    source: int
    slot: int

    def release(self) -> None:
        """Free the slot of the box; the sender takes its memory back."""
        self.fabric.free(self.source, self.slot)


class SharedFabric(Fabric):
    """One rank's side of the control segment, and its staging memory."""

    def __init__(
        self,
        rank: int,
        control: Control,
        memory: MappedMemory,
        identities: list[Identity],
        *,
        ranks: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        self._ranks = ranks  # of the world, by coordinate
        self._has_said = False
        self.rank = rank
        self.size = control.size
        self._control = control
        self._memory = memory
        self._identities = identities
        self._timeout_seconds = timeout_seconds
        self._staging = Staging(memory)
        self._num_sent = [0] * self.size
        self._num_taken = [0] * self.size
        self._in_boxes: list[deque[tuple[int, Staged]]] = [
            deque() for _ in range(self.size)
        ]  # by peer: (slot, data)
        at_departure(self, partial(control.leave, rank))

    def follow(self, paths: Paths) -> None:
        """New memory is a piece of a segment, or one of its own."""
        self._memory.follow(paths)

    def post(self, signal: Signal, *to: int) -> None:
        """Add one to each semaphore of (signal, self, to)."""
        first = self._index(signal, self.rank, 0)
        self._control.semaphores.post(*[first + peer for peer in to])

    def try_take(self, signal: Signal, source: int) -> bool:
        """Take one from the semaphore of (signal, source, self) if it can be had."""
        return self._control.semaphores.try_take(self._index(signal, source, self.rank))

    def take(self, signal: Signal, source: int) -> None:
        """Wait for it, looking at the peer in between.

        Raises:
            RankFailed: the peer has left, is dead or silent, or another rank is lost.
        """
        index = self._index(signal, source, self.rank)
        if self._control.semaphores.take(index, CUT_SECONDS):
            return
        began = time.monotonic() - CUT_SECONDS
        look = LOOK_SECONDS
        self._control.waits[self.rank] = source + 1
        while not self._control.semaphores.take(index, CUT_SECONDS):
            if self._memory.severance.is_cut:
                raise RankFailed("a rank of this run is lost")
            waited = time.monotonic() - began
            if waited < look:
                continue
            look = waited + LOOK_SECONDS
            left = bool(self._control.left[source])
            alive = self._identities[source].alive()
            if not left and alive and waited < self._timeout_seconds:
                self._say(source, waited)
                continue
            if self.try_take(signal, source):  # posted just before the peer went
                break
            if left or not alive:
                why = "has left: its part of the run is over" if alive else "is dead"
                raise RankFailed(f"{self._name(source)} {why}")
            silent = self._name(self._control.awaited(source))
            raise RankFailed(
                f"{silent} was silent for {self._timeout_seconds:g} s ([recovery] hang_seconds)"
            )
        self._control.waits[self.rank] = 0
        self._has_said = False

    def _name(self, coordinate: int) -> str:
        who = f"rank {self._ranks[coordinate]}, process {self._identities[coordinate].pid}"
        return f"coordinate {coordinate} of the axis ({who})"

    def _say(self, source: int, waited: float) -> None:
        """One line, once a wait has become long."""
        if waited < NOTICE_SECONDS or self._has_said:
            return
        self._has_said = True
        end = self._ranks[self._control.awaited(source)]
        line = f"plait: rank {self._ranks[self.rank]} has been waiting for rank {end}"
        sys.stderr.write(f"{line} for {waited:.0f} s\n")
        sys.stderr.flush()

    def publish(self, header: Header, data: Tensor | None) -> None:
        """Write the header into this rank's ring."""
        place = (0, 0, 0, 0)
        if data is not None and data.numel():
            found = self._memory.place(data)
            assert found is not None  # `Participant` staged what was not readable
            place = (found.number, found.descriptor, found.num_bytes, found.offset)
        words = (
            header.number,
            OPS.index(header.op),
            header.numel,
            DTYPES.index(header.dtype),
            *place,
            *header.offsets,
        )
        self._control.headers[self.rank, header.number % RING, : len(words)] = words

    def read(self, peer: int, number: int) -> Header:
        """Read a header out of a peer's ring."""
        words = self._control.headers[peer, number % RING].tolist()
        return Header(
            words[0], OPS[words[1]], words[2], DTYPES[words[3]], tuple(words[_PLAIN_WORDS:])
        )

    def data(self, peer: int, header: Header) -> Tensor:
        """Where the header says."""
        place = Location(
            *self._control.headers[peer, header.number % RING, 4:_PLAIN_WORDS].tolist()
        )
        return self._map(peer, place, header.dtype, header.numel)

    def readable(self, tensor: Tensor) -> bool:
        """Whether it lies in the readable memory of this rank."""
        return tensor.numel() == 0 or self._memory.place(tensor) is not None

    def stage(self, numel: int, dtype: torch.dtype) -> Staged:
        """Staging memory of (numel,) elements: the next place of this rank's ring."""
        return self._staging.borrow(numel, dtype)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised (numel,) in the memory of this rank that its peers can read."""
        return self._memory.empty(numel, dtype)

    def is_full(self, to: int) -> bool:
        """Whether the next slot of the box holds a message that is not yet read."""
        return bool(self._control.boxes[self.rank, to][self._num_sent[to] % RING, 0])

    def send_message(self, to: int, tag: int, flat: Tensor) -> None:
        """Into the next slot of the box, once it is free."""
        box = self._control.boxes[self.rank, to]
        slot = self._num_sent[to] % RING
        self._num_sent[to] += 1
        while box[slot, 0]:
            self.take(Signal.TAKEN, to)
        self._reclaim(to)
        staged = self._staging.borrow(flat.numel(), flat.dtype)
        staged.tensor.copy_(flat)
        place = self._memory.place(staged.tensor) if flat.numel() else Location(0, 0, 0, 0)
        assert place is not None  # it is borrowed from that memory
        words = (place.number, place.descriptor, place.num_bytes, place.offset)
        box[slot] = (1, tag, flat.numel(), DTYPES.index(flat.dtype), *words)
        self._in_boxes[to].append((slot, staged))
        self.post(Signal.MESSAGE, to)

    def next_message(self, source: int, block: bool) -> InboundMessage | None:
        """Out of the next slot of the box."""
        if block:
            self.take(Signal.MESSAGE, source)
        elif not self.try_take(Signal.MESSAGE, source):
            return None
        slot = self._num_taken[source] % RING
        self._num_taken[source] += 1
        _, tag, numel, dtype, *place = self._control.boxes[source, self.rank, slot].tolist()
        return _SlotMessage(
            tag, self._map(source, Location(*place), DTYPES[dtype], numel), self, source, slot
        )

    def free(self, source: int, slot: int) -> None:
        """A message has been copied."""
        self._control.boxes[source, self.rank, slot, 0] = 0
        self.post(Signal.TAKEN, source)

    def _reclaim(self, to: int) -> None:
        """Take back the memory of messages that were copied, in the order of sending."""
        box = self._control.boxes[self.rank, to]
        lent = self._in_boxes[to]
        while lent and not box[lent[0][0], 0]:
            lent.popleft()[1].release()
            self.try_take(Signal.TAKEN, to)

    def _map(self, peer: int, place: Location, dtype: torch.dtype, numel: int) -> Tensor:
        """The peer's memory, mapped at first sight."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        try:
            return self._memory.peer(self._identities[peer].pid, place, dtype, numel)
        except OSError as error:
            raise RankFailed(
                f"the memory of coordinate {peer} cannot be mapped: {error}"
            ) from error

    def close(self) -> None:
        """Mark as left."""
        self._control.leave(self.rank)

    def _index(self, signal: Signal, source: int, to: int) -> int:
        return (signal * self.size + source) * self.size + to


class ObjectExchange(Protocol):
    """The ranks of one axis, and small picklable things between them."""

    rank: int
    size: int

    def gather_objects(self, item: object) -> list[Any]:
        """The things of all ranks, in order."""


def connect(
    exchange: ObjectExchange, memory: MappedMemory, timeout_seconds: float, ranks: Sequence[int]
) -> Direct | None:
    """Shared memory for the ranks of an axis, or None where they cannot read each other's memory.
    The answer is alike on every rank.

    `ranks` are those of the world, by coordinate: errors name them.
    """
    if not all(exchange.gather_objects(available())):
        return None
    own_identity = Identity.own()
    control = Control.create(exchange.size, memory) if exchange.rank == 0 else None
    sides = exchange.gather_objects((own_identity, control.place(memory) if control else None))
    identities = [identity for identity, _ in sides]
    if all(own_identity.same_host(other) for other in identities) and control is None:
        control = _mapped(exchange.size, memory, identities[0].pid, sides[0][1])
    if not all(
        exchange.gather_objects(
            control is not None and all(own_identity.same_host(other) for other in identities)
        )
    ):
        return None
    assert control is not None
    fabric = SharedFabric(
        exchange.rank, control, memory, identities, ranks=ranks, timeout_seconds=timeout_seconds
    )
    return Direct(fabric)


def _mapped(size: int, memory: MappedMemory, pid: int, place: Location) -> Control | None:
    try:
        return Control(size, memory.peer(pid, place, torch.uint8, Control.num_bytes(size)))
    except OSError:  # other process namespaces, or no permission: then Gloo
        return None
