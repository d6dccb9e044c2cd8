"""A bucket: parameters that are used together, laid end to end in one flat buffer.

One buffer means one collective and one reduction for a whole block, and a shard that is a range of
elements: every rank's shard has the same length whatever the shapes of the parameters are. The
buffer is padded to a multiple of the number of shards, so at most `num_shards - 1` elements a
bucket are padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from plait.mesh import Shard
from plait.mesh.boxes import Box


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its bucket: elements [offset, offset + numel)."""

    name: str
    param: nn.Parameter
    offset: int
    shape: torch.Size

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return self.shape.numel()

    @property
    def stop(self) -> int:
        """The first element after the parameter."""
        return self.offset + self.numel


@dataclass(frozen=True)
class SlotRange:
    """The elements [start, stop) of one parameter that lie in a range of the bucket, at `offset` in
    that range.
    """

    slot: Slot
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """Whether the part is the whole parameter."""
        return self.numel == self.slot.numel

    def view(self, flat: Tensor) -> Tensor:
        """The part's elements inside `flat`, the buffer of the range: in the parameter's shape if
        whole, else (numel,). A view.
        """
        piece = flat[self.offset : self.offset + self.numel]
        return piece.view(self.slot.shape) if self.whole else piece

    def shard(self, tensor: Tensor) -> Shard:
        """The shard of this rank's parameter that the part is, with the values of `tensor`: `numel`
        elements in any shape.
        """
        shape = tuple(self.slot.shape)
        values = tensor.detach().reshape(-1)
        return Shard(self.slot.name, shape, Box.whole(shape), self.start, self.stop, values)


@dataclass(frozen=True)
class Bucket:
    """The layout of one flat buffer. It owns no memory: strategies decide which buffers live, and
    when.

    Shapes: the full buffer is (padded_numel,), a rank's shard (shard_numel,).
    """

    name: str
    slots: tuple[Slot, ...]
    num_shards: int

    @classmethod
    def of(cls, name: str, params: Sequence[tuple[str, nn.Parameter]], num_shards: int) -> Bucket:
        """Lay the named parameters, of any shapes, end to end for `num_shards` shards."""
        slots = []
        offset = 0
        for param_name, param in params:
            slots.append(Slot(param_name, param, offset, param.shape))
            offset += param.numel()
        return cls(name, tuple(slots), num_shards)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return self.slots[-1].stop if self.slots else 0

    @cached_property
    def shard_numel(self) -> int:
        """Number of elements of a shard, with padding."""
        return -(-self.numel // self.num_shards)

    @property
    def padded_numel(self) -> int:
        """Number of elements of the flat buffer."""
        return self.shard_numel * self.num_shards

    @property
    def padding(self) -> int:
        """Number of elements that belong to no parameter."""
        return self.padded_numel - self.numel

    def shard(self, flat: Tensor, index: int) -> Tensor:
        """Shard `index` (shard_numel,) of a full flat buffer (padded_numel,), as a view."""
        return flat[index * self.shard_numel : (index + 1) * self.shard_numel]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's elements inside a flat buffer of at least (numel,), as a view in the
        parameter's shape.
        """
        return [flat[slot.offset : slot.stop].view(slot.shape) for slot in self.slots]

    def parts(self, start: int, stop: int) -> Iterator[SlotRange]:
        """The parts of parameters in the elements [start, stop) of the flat buffer, in order."""
        for slot in self.slots:
            low = max(start, slot.offset)
            high = min(stop, slot.stop)
            if low < high:
                yield SlotRange(slot, low - slot.offset, high - slot.offset, low - start)

    def shard_parts(self, index: int) -> list[SlotRange]:
        """The parts of parameters in shard `index`."""
        return list(self.parts(index * self.shard_numel, (index + 1) * self.shard_numel))
