"""Memory on the host for copies of a state. Tensors of a device come by a stream of their own.

On processors a copy is one call. From a GPU it goes into pinned memory, which is made once. Its
stream waits for what the device was asked before, and runs beside the next forward and backward.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.file import file_order
from plait.mesh import Shard

Form = tuple[torch.dtype, int]


class SideStream:
    """Copies from one device into pinned memory, beside what the device computes.

    `api` is `torch.cuda`, or what has its streams and events.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        self._device = device
        self._api = api
        self._stream = api.Stream(device)
        self._ready: Any = None
        self._pins = bool(api.is_available())

    def mark(self) -> None:
        """Copies that begin after this see what the calling thread has asked for until now."""
        self._ready = self._api.Event()
        self._ready.record(self._api.current_stream(self._device))

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor [...] lies on the device."""
        return tensor.device.type == self._device.type

    def room(self, num_bytes: int) -> Tensor:
        """Pinned memory, uint8 [num_bytes], so that a copy into it needs no thread of the host."""
        is_there = bool(self._api.is_available())
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_there)

    def pin(self, memory: Tensor) -> Callable[[], object] | None:
        """Pin memory that processes share, uint8 [num_bytes]; the answer gives it free. None where
        the driver refuses, which is then not asked again.

        It is not for a file on a disk: Linux lets no device write into one for long.
        """
        if not self._pins:
            return None
        driver = self._api.cudart()
        place = memory.data_ptr()
        owner = os.getpid()
        if int(driver.cudaHostRegister(place, memory.numel(), 0)):
            self._pins = False
            self._take_the_refusal()
            return None

        def unpin() -> None:
            if os.getpid() == owner:  # a forked child has the memory, and not the driver
                driver.cudaHostUnregister(place)

        return unpin

    def _take_the_refusal(self) -> None:
        """Launch a kernel, which raises what the last call of the driver has left behind. Else the
        next kernel of a step would raise it.
        """
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)

    def begin(self, rooms: Sequence[Tensor], values: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to copy `values` [n] into `rooms` [n] each; the answer waits for it, in any thread.

        No one may write the values before, nor give them free.
        """
        done = self._api.Event(blocking=True)  # who waits takes no processor
        self._stream.wait_event(self._ready)
        with self._api.stream(self._stream):
            copy_each(rooms, values)
            done.record(self._stream)
        wait: Callable[[], None] = done.synchronize
        return wait


def side_stream_of(device: torch.device) -> SideStream | None:
    """The stream for copies of a device's tensors; None where these are in the host's memory."""
    return SideStream(device) if device.type == "cuda" else None


def copy_each(rooms: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Have a device copy each of `values` [n] into one of `rooms` [n], without waiting for it.

    It is one call: the thread of the steps has the interpreter meanwhile.
    """
    torch._foreach_copy_(list(rooms), list(values), non_blocking=True)


def copy_values(
    rooms: Sequence[Tensor], values: Sequence[Tensor], side: SideStream | None = None
) -> None:
    """Copy `values` [n] into `rooms` [n] each; what lies on a device comes by `side`."""
    pairs = [*zip(rooms, values, strict=True)]
    far = [pair for pair in pairs if side is not None and side.has(pair[1])]
    near = pairs if side is None else [pair for pair in pairs if not side.has(pair[1])]
    wait = None
    with torch.no_grad():
        if side is not None and far:
            wait = side.begin([room for room, _ in far], [value for _, value in far])
        if near:  # one call, without the interpreter
            torch._foreach_copy_([room for room, _ in near], [value for _, value in near])
    if wait is not None:
        wait()


class Room:
    """Memory on the host for copies of a run's state, one after the other.

    Copies lie in it as their file has them, so that this is written in one piece.
    """

    def __init__(self, side: SideStream | None = None) -> None:
        self._side = side
        self._forms: list[Form] = []
        self._values: list[Tensor] = []
        self._given: list[Shard] = []
        self._copies: list[Shard] = []

    def mark(self) -> None:
        """Copies from here on are of the present state. In the thread that makes the steps."""
        if self._side is not None:
            self._side.mark()

    def pin(self, memory: Tensor) -> Callable[[], object] | None:
        """Have a device's driver pin shared memory, uint8 [num_bytes], as `SideStream.pin` does;
        None where there is no device.
        """
        return None if self._side is None else self._side.pin(memory)

    def copy_into(self, rooms: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copy `values` [n] into `rooms` [n] each. Rooms of what lies on a device are pinned."""
        copy_values(rooms, values, self._side)

    def copy(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copies of these shards, in the memory of those before where they are alike."""
        copies = self._copies_of(shards)
        self.copy_into(self._values, [shard.values for shard in shards])
        return copies

    def _copies_of(self, shards: Sequence[Shard]) -> list[Shard]:
        """The shards with this memory for their values. Those of the last copy are known."""
        given = list(shards)
        if len(given) == len(self._given) and all(map(is_, given, self._given)):
            return [*self._copies]
        forms = [(shard.values.dtype, shard.numel) for shard in given]
        if forms != self._forms:
            self._values = self._rooms(forms)
            self._forms = forms
        pairs = zip(given, self._values, strict=True)
        self._copies = [replace(shard, values=values) for shard, values in pairs]
        self._given = given
        return [*self._copies]

    def _rooms(self, forms: Sequence[Form]) -> list[Tensor]:
        """Room for tensors of these forms in one piece of memory, in the order of their file."""
        num_bytes = sum(dtype.itemsize * count for dtype, count in forms)
        if self._side is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        else:
            memory = self._side.room(num_bytes)
        rooms = [memory] * len(forms)
        start = 0
        for index in file_order([("", dtype, (count,)) for dtype, count in forms]):
            dtype, count = forms[index]
            end = start + dtype.itemsize * count
            rooms[index] = memory[start:end].view(dtype)
            start = end
        return rooms
