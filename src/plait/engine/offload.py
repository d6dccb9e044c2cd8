"""Activations in host memory: what a block keeps for its backward waits there until it is needed.

What block i has kept goes down beside the forward of block i+1, and comes up beside the backward
of block i+1. So a device holds the activations of two blocks, and of the layers around them.

    forward     F0 | F1, 0 down | F2, 1 down | F3, 2 down
    backward    B3, 2 up | B2, 1 up | B1, 0 up | B0

Whole storages move, each once, however many views of it are kept. Weights stay. On a processor
the copies are memory like any other: nothing is gained, and the same code is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from plait.errors import ModelError
from plait.forwards import give_forward
from plait.values import PyTree

SMALL_BYTES = 16 * 1024
"""Storages below this stay on an accelerator: a copy costs more than the memory is worth."""
_PLAIN = (Tensor, nn.Parameter)


def apply(model: nn.Module, blocks: Sequence[str], device: torch.device) -> None:
    """Have each block keep its activations in host memory. Raises `ModelError` without blocks."""
    if not blocks:
        raise ModelError(
            "offload_activations works block by block, and this model names none; pass "
            "blocks='layers.*'"
        )
    offload = Offload(device)
    for index, name in enumerate(blocks):
        block = model.get_submodule(name)
        give_forward(block, offload.around(block.forward, block, (index, name)))


class Storage:
    """One storage [nbytes] that a block keeps: on the device, in host memory, or in both."""

    def __init__(self, device: Tensor) -> None:
        self.device: Tensor | None = device
        self.host: Tensor | None = None

    def copied(self, host: Tensor) -> None:
        """Take a copy [nbytes] in host memory."""
        self.host = host

    def leave(self) -> None:
        """Give the device's memory back."""
        self.device = None

    def brought(self, device: Tensor) -> None:
        """Take a copy [nbytes] on the device again."""
        self.device = device


class Kept:
    """One tensor that autograd keeps: a view of a storage, and the tensor while it is there."""

    def __init__(self, tensor: Tensor, storage: Storage, call: BlockCall) -> None:
        self.storage = storage
        self.call = call
        self._dtype = tensor.dtype
        self._place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._first: Tensor | None = tensor.detach()
        self._version = tensor._version

    def leave(self) -> None:
        """Forget the tensor of the forward, of which there is a copy now."""
        self._check()
        self._first = None
        self.storage.leave()

    def tensor(self) -> Tensor:
        """The tensor [...] again, on the device."""
        self.call.arrive()
        if self._first is not None:
            self._check()
            return self._first
        there = self.storage.device
        if there is None:
            raise RuntimeError(f"activations of '{self.call.name}' were not brought back")
        view = torch.empty(0, dtype=self._dtype, device=there.device)
        view.set_(there.untyped_storage(), *self._place)
        return view

    def _check(self) -> None:
        """Autograd itself would raise later: it sees no change of a tensor that hooks have."""
        if self._first is not None and self._first._version != self._version:
            raise ModelError(
                f"'{self.call.name}' needs a tensor of shape {tuple(self._place[1])} for its "
                "gradient, and it was changed in place after it was kept; let the model make a "
                "new tensor, or leave offload_activations out"
            )


class BlockCall:
    """A call of a block, and what autograd keeps of it. What backward has used is gone."""

    def __init__(self, offload: Offload, place: tuple[int, str], before: BlockCall | None) -> None:
        self.index, self.name = place
        self._offload = offload
        self._before = before if before is not None and before.index == self.index - 1 else None
        self._kept: list[ref[Kept]] = []
        self._sent: Any = None
        self._coming: tuple[Any, Sequence[Tensor]] | None = None
        self._used = False

    def add(self, kept: Kept) -> None:
        """Take what autograd has just kept."""
        self._kept.append(ref(kept))

    def send(self) -> None:
        """Start the copies to the host."""
        here = [(one, one.device) for one in self._storages() if one.device is not None]
        hosts, self._sent = self._offload.copies.down([device for _, device in here])
        for (storage, _), host in zip(here, hosts, strict=True):
            storage.copied(host)

    def leave(self) -> None:
        """Free the device's memory; later kernels wait for the copies that read it."""
        self._offload.copies.wait(self._sent)
        for kept in self._alive():
            kept.leave()
        self._used = False

    def bring(self) -> None:
        """Start the copies to the device, of storages that are not there."""
        gone = [one for one in self._storages() if one.device is None]
        away = [(one, one.host) for one in gone if one.host is not None]
        if away:
            devices, event = self._offload.copies.up([host for _, host in away])
            for (storage, _), device in zip(away, devices, strict=True):
                storage.brought(device)
            self._coming = (event, devices)

    def arrive(self) -> None:
        """Have the storages on the device, and start to bring those of the block before."""
        if self._used:
            return
        self._used = True
        self.bring()
        self.settle()
        before, self._before = self._before, None
        if before is not None:
            self._offload.bring(before)

    def settle(self) -> None:
        """Later kernels wait for the copies to the device."""
        if self._coming is not None:
            self._offload.copies.wait(self._coming[0])
            self._coming = None

    def _alive(self) -> list[Kept]:
        return [kept for one in self._kept if (kept := one()) is not None]

    def _storages(self) -> list[Storage]:
        return list({id(kept.storage): kept.storage for kept in self._alive()}.values())


class Offload:
    """The blocks of one model: of the newest call the activations are still on the device."""

    def __init__(self, device: torch.device) -> None:
        self.copies = (Streams if device.type == "cuda" else Copies)(device)
        self._device = device
        self._small_bytes = 0 if device.type == "cpu" else SMALL_BYTES
        self._newest: BlockCall | None = None
        self._coming: BlockCall | None = None

    def around(
        self, forward: Callable[..., PyTree], block: nn.Module, place: tuple[int, str]
    ) -> Callable[..., PyTree]:
        """The forward of a block that keeps its activations here. `place` is (index, name)."""

        def keeping(*args: PyTree, **kwargs: PyTree) -> PyTree:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            call = BlockCall(self, place, self._newest)
            storages: dict[int, Storage] = {}
            pack = self._packing(call, _weights(block), storages)
            with saved_tensors_hooks(pack, _unpack):
                output = forward(*args, **kwargs)
            storages.clear()  # autograd keeps `pack`, and must not keep them by it
            call.send()
            if self._newest is not None:
                self._newest.leave()
            self._newest = call
            return output

        return keeping

    def bring(self, call: BlockCall) -> None:
        """Bring a call up ahead of its use. One that was not used is waited for first: copies
        must not write into memory that others have by then.
        """
        if self._coming is not None:
            self._coming.settle()
        call.bring()
        self._coming = call

    def _packing(
        self, call: BlockCall, weights: set[int], storages: dict[int, Storage]
    ) -> Callable[[Tensor], Kept | Tensor]:
        def pack(tensor: Tensor) -> Kept | Tensor:
            if not self._moves(tensor, weights):
                return tensor if tensor.is_leaf else tensor.detach()
            address = tensor.untyped_storage().data_ptr()
            storage = storages.get(address)
            if storage is None:
                storage = storages[address] = Storage(_bytes_of(tensor))
            kept = Kept(tensor, storage, call)
            call.add(kept)
            return kept

        return pack

    def _moves(self, tensor: Tensor, weights: set[int]) -> bool:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return False
        if tensor.device.type != self._device.type or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() > self._small_bytes and storage.data_ptr() not in weights


class Copies:
    """Copies that are made at once. What `down` and `up` return beside them is for `wait`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def down(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Copies in host memory of bytes [nbytes] on the device."""
        return [one.to("cpu", copy=True) for one in tensors], None

    def up(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Copies on the device of bytes [nbytes] in host memory."""
        return [one.to(self._device, copy=True) for one in tensors], None

    def wait(self, event: Any) -> None:
        """Have the copies made before what follows."""


class Streams(Copies):
    """Copies by pinned memory and two streams, beside the kernels of the current stream.

    Device memory is the current stream's. It is given back only when that stream waits for the
    copies. So the allocator needs no events of ours.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def down(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        places = [_pinned(len(one)) for one in tensors]
        return self._copied(self._down, tensors, places)

    def up(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        device = self._device
        places = [torch.empty(len(one), dtype=torch.uint8, device=device) for one in tensors]
        return self._copied(self._up, tensors, places)

    def wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _copied(
        self, stream: torch.cuda.Stream, tensors: Sequence[Tensor], places: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        """`places` [nbytes] each, which `stream` fills after what the kernels' stream has to do."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for place, one in zip(places, tensors, strict=True):
                place.copy_(one, non_blocking=True)
        return places, stream.record_event()


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _unpack(kept: Kept | Tensor) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as bytes [nbytes]."""
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage())


def _weights(block: nn.Module) -> set[int]:
    """Where the parameters and buffers of a block lie, which stay on the device."""
    tensors = chain.from_iterable(
        chain(module._parameters.values(), module._buffers.values()) for module in block.modules()
    )
    return {
        one.untyped_storage().data_ptr()
        for one in tensors
        if one is not None and type(one) in _PLAIN
    }
