"""Buffers under recomputation. The forward that runs again finds them as the first run did, and
leaves them unchanged.

A batch norm moves its running statistics in every forward, a spectral norm its singular vectors, a
codebook its means. The second forward, which only backward needs, must not move them once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SMALL_BYTES = 64 * 1024
Slot = tuple[nn.Module, str]
Context = AbstractContextManager[object]


class Buffers:
    """The buffers of one block, and which of them its forward changes.

    Small ones are always taken to change: torch's batch norm changes its statistics without
    counting a version. The first forward copies large ones (masks, rotary tables). Later forwards
    do so only if one has been seen to change them.
    """

    def __init__(self, block: nn.Module, *, small_bytes: int = SMALL_BYTES) -> None:
        self._modules = [module for module in block.modules() if module._buffers]
        self._small_bytes = small_bytes
        self._changing: set[Slot] = set()
        self._seen = False

    def __bool__(self) -> bool:
        return bool(self._modules)

    def tensors(self) -> dict[Slot, Tensor | None]:
        """The tensor [...] in every buffer's place; None where it is yet to be made."""
        return {
            (module, key): tensor
            for module in self._modules
            for key, tensor in module._buffers.items()
        }

    def may_change(self, slot: Slot, tensor: Tensor) -> bool:
        """Whether a forward may write into a buffer [...], as far as is known."""
        return not self._seen or tensor.nbytes <= self._small_bytes or slot in self._changing

    def learn(self, before: Snapshot) -> None:
        """Note which buffers the forward since `before` has written into."""
        for slot, tensor in before.tensors.items():
            if tensor is not None and before.differs(slot, tensor, by_value=not self._seen):
                self._changing.add(slot)
        self._seen = True


class Snapshot:
    """The tensors in the places of a block's buffers, and the values of those that may change."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.tensors = buffers.tensors()
        self._versions: dict[Slot, int] = {}
        self._values: dict[Slot, Tensor] = {}
        for slot, tensor in self.tensors.items():
            if tensor is not None:
                self._versions[slot] = tensor._version
                if buffers.may_change(slot, tensor):
                    self._values[slot] = tensor.detach().clone()

    def differs(self, slot: Slot, tensor: Tensor, *, by_value: bool) -> bool:
        """Whether a tensor [...] was written into since; by value as well as by its version."""
        if tensor._version != self._versions[slot]:
            return True
        return by_value and not torch.equal(tensor, self._values[slot])

    def forget_constants(self) -> None:
        """Give back the copies of buffers that no forward has changed."""
        for slot, tensor in self.tensors.items():
            if tensor is not None and not self._buffers.may_change(slot, tensor):
                self._values.pop(slot, None)

    def restore(self) -> None:
        """Put tensors and values back.

        Values are written through `data`: a graph that has kept the buffer for its backward must
        not take it for changed.
        """
        for (module, key), tensor in self.tensors.items():
            module._buffers[key] = tensor
        for slot, value in self._values.items():
            tensor = self.tensors[slot]
            if tensor is not None:
                tensor.data.copy_(value)


class First:
    """Around the first forward of a block: remembers its buffers as they were before."""

    def __init__(self, buffers: Buffers, inner: Context) -> None:
        self._buffers = buffers
        self._inner = inner
        self.before: Snapshot | None = None

    def __enter__(self) -> None:
        with torch.no_grad():
            self.before = Snapshot(self._buffers)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        if self.before is not None:
            with torch.no_grad():
                self._buffers.learn(self.before)
            self.before.forget_constants()


class Again:
    """Around the forward that backward repeats: the buffers as before the first one, and afterwards
    as they are now.
    """

    def __init__(self, buffers: Buffers, first: First, inner: Context) -> None:
        self._buffers = buffers
        self._first = first
        self._inner = inner
        self._now: Snapshot | None = None

    def __enter__(self) -> None:
        with torch.no_grad():
            self._now = Snapshot(self._buffers)
            if self._first.before is not None:
                self._first.before.restore()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            if self._now is not None:
                with torch.no_grad():
                    self._now.restore()
                self._now = None


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Leave a model's buffers as they were, whatever its forward does to them."""
    before = Snapshot(Buffers(model))
    try:
        yield
    finally:
        before.restore()
