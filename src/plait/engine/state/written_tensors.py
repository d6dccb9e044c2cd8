"""Tensors that a forward may write into: those of a block beside its parameters, and given ones.

A batch norm moves its running statistics in every forward, a spectral norm its singular vectors, a
codebook its means. The second forward, which only backward needs, must not move them once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from plait.held import own_attributes, tensors_in
from plait.parallel.pipeline.side_effects import attributes_kept

SMALL_BYTES = 64 * 1024
Tensors = Mapping[object, Tensor]
"""Tensors [...], each with what names its place."""


class WrittenTensors:
    """Which tensors a forward writes into, as far as has been seen.

    Small ones are always taken to change: torch's batch norm changes its statistics without
    counting a version. The first forward copies large ones (masks, rotary tables). Later forwards
    do so only if one has been seen to change them.
    """

    def __init__(self, *, small_bytes: int = SMALL_BYTES) -> None:
        self._small_bytes = small_bytes
        self._changing: set[object] = set()
        self._seen = False

    def may_change(self, place: object, tensor: Tensor) -> bool:
        """Whether a forward may write into a tensor [...], as far as is known."""
        return not self._seen or tensor.nbytes <= self._small_bytes or place in self._changing

    def learn(self, before: Snapshot) -> None:
        """Note which tensors the forward since `before` has written into."""
        self._changing |= before.written(by_value=not self._seen)
        self._seen = True

    @contextmanager
    def watched(self, tensors: Tensors) -> Iterator[Snapshot]:
        """Around a forward: the values as they were before, from which the next one learns."""
        before = Snapshot(self, tensors)
        try:
            yield before
        finally:
            self.learn(before)
            before.forget_constants()


class Snapshot:
    """Some tensors, and the values of those that may change, as they are now."""

    def __init__(self, known: WrittenTensors, tensors: Tensors) -> None:
        self._known = known
        self._values: dict[object, tuple[Tensor, int, Tensor | None]] = {}
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for place, tensor in tensors.items():
                if _can_be_written(tensor):
                    value = tensor.detach().clone() if known.may_change(place, tensor) else None
                    self._values[place] = (tensor, tensor._version, value)

    def written(self, *, by_value: bool) -> set[object]:
        """The places of tensors written into since; by their values as well as by versions."""
        return {
            place
            for place, (tensor, version, value) in self._values.items()
            if tensor._version != version
            or (by_value and value is not None and not torch.equal(tensor, value))
        }

    def forget_constants(self) -> None:
        """Give back the copies of tensors that no forward has changed."""
        for place, (tensor, version, _) in self._values.items():
            if not self._known.may_change(place, tensor):
                self._values[place] = (tensor, version, None)

    def now(self) -> Snapshot:
        """Values of the same tensors as they are by now."""
        return Snapshot(self._known, {place: one for place, (one, *_) in self._values.items()})

    def put_back(self) -> None:
        """Put the values back into the tensors.

        They are written through `data`: a graph that has kept a tensor for its backward must not
        take it for changed.
        """
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for tensor, _, value in self._values.values():
                if value is not None:
                    tensor.data.copy_(value)


def kept_by(module: nn.Module) -> dict[object, Tensor]:
    """The buffers of a module and its submodules, and other tensors [...] in attributes."""
    return dict(tensors_in(own_attributes(module)))


def _can_be_written(tensor: Tensor) -> bool:
    """Whether a forward may write into a tensor [...], which has a place for each number then."""
    if isinstance(tensor, nn.Parameter) or tensor.is_meta or tensor.is_inference():
        return False
    if tensor.is_nested or tensor.layout is not torch.strided:
        return not tensor.is_nested
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    return all(stride or size < 2 for stride, size in dims)


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Leave what a model keeps beside its parameters as it was, whatever its forward does."""
    before = Snapshot(WrittenTensors(), kept_by(model))
    try:
        with attributes_kept(model):
            yield
    finally:
        before.put_back()
