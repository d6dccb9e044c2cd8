"""Frozen parameters in codes of a few bits: whole numbers are there while a unit is used.

What ZeRO-3 does with shards is done with codes. The numbers of a unit are decoded before its
forward, freed after it, and decoded again before its backward. Where ranks share the codes, each
keeps some blocks of a unit, and what is gathered is bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from plait.mesh import Shard
from plait.mesh.boxes import Box
from plait.parallel.data.absent import Wanted
from plait.parallel.data.bucket import Bucket, Slot
from plait.parallel.data.sharded_unit import GatheredBucket
from plait.parallel.data.strategy import DataGroup
from plait.parallel.data.units import Unit
from plait.parallel.data.zero3 import Zero3

SCALE = 4
"""The bytes of a block's scale."""


class Coding(Protocol):
    """How one parameter is kept in blocks: for each block its codes, and a scale in float32."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the parameter."""

    @property
    def code_bytes(self) -> int:
        """The bytes of the codes of a block; all parameters of a model have as many."""

    def start_of(self, block: int) -> int:
        """How many numbers of the parameter come before a block."""

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the numbers of all blocks into `out`, of the parameter's shape."""

    def part(self, codes: Tensor, scales: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """The numbers (n,) of some blocks from the block `first` on."""


class CodedBucket(GatheredBucket):
    """The blocks of one bucket: this rank's codes and scales, and the numbers (padded_numel,) that
    come and go.

    `shard` is the codes of this rank's blocks, then their scales, in bytes.
    """

    def __init__(
        self, bucket: Bucket, group: DataGroup, take: Wanted, codings: Mapping[str, Coding]
    ) -> None:
        self._codings = [codings[slot.name] for slot in bucket.slots]
        self._blocks = _blocks_of(bucket, self._codings)
        self._code_bytes = self._codings[0].code_bytes
        super().__init__(bucket, group, take)
        self._gathered: Tensor | None = None
        self._wide = group.master_dtype

    def _empty_shard(self, group: DataGroup) -> Tensor:
        num_bytes = self._blocks.shard_numel * (self._code_bytes + SCALE)
        return group.shard.empty(num_bytes, torch.uint8, group.device).zero_()

    def gather(self) -> None:
        """Start the all-gather of the bytes where ranks share them. Collective."""
        if self._axis.size > 1:
            each = self.shard.numel()
            self._gathered = self.shard.new_empty(self._axis.size * each)
            padding = self._blocks.padding * (self._code_bytes + SCALE)
            self._work = self._axis.all_gather(self._gathered, self.shard, padding=padding)

    def wait(self) -> None:
        """Have the numbers."""
        super().wait()
        self._full.untyped_storage().resize_(self._bytes)
        codes, scales = self._apart(self.shard if self._gathered is None else self._gathered)
        numbers = self.bucket.views(self._full)
        for slot, coding, out in zip(self._blocks.slots, self._codings, numbers, strict=True):
            held = slice(slot.offset, slot.stop)
            coding.decode(codes[held].flatten(), scales[held], out)
        self._gathered = None

    def _apart(self, shards: Tensor) -> tuple[Tensor, Tensor]:
        """The codes [blocks, bytes] and the scales [blocks] of one shard or of all."""
        each = self._blocks.shard_numel * self._code_bytes
        rows = shards.view(-1, self.shard.numel())
        codes = rows[:, :each].reshape(-1, self._code_bytes)
        return codes, rows[:, each:].reshape(-1).view(torch.float32)

    def keep_written(self) -> None:
        """Codes stay as they are."""

    def load(self, index: int, value: Tensor) -> None:
        """Keep this rank's blocks of slot `index`; `value` is all its codes, then its scales."""
        coding = self._codings[index]
        all_codes = value[: coding.num_blocks * self._code_bytes].view(-1, self._code_bytes)
        all_scales = value[all_codes.numel() :].view(torch.float32)
        codes, scales = self._apart(self.shard)
        for part in self._blocks.shard_parts(self._axis.rank):
            if part.slot is self._blocks.slots[index]:
                stop = part.offset + part.numel
                codes[part.offset : stop].copy_(all_codes[part.start : part.stop])
                scales[part.offset : stop].copy_(all_scales[part.start : part.stop])

    def shards(self) -> list[Shard]:
        """None: no memory has the numbers between two uses."""
        return []

    def decoded(self) -> list[Shard]:
        """The numbers of this rank's blocks, in memory of their own and in master precision."""
        codes, scales = self._apart(self.shard)
        shards = []
        for part in self._blocks.shard_parts(self._axis.rank):
            index = self._blocks.slots.index(part.slot)
            coding, slot = self._codings[index], self.bucket.slots[index]
            held = slice(part.offset, part.offset + part.numel)
            values = coding.part(codes[held].flatten(), scales[held], part.start, self._wide)
            start, stop = coding.start_of(part.start), coding.start_of(part.stop)
            shape = tuple(slot.shape)
            shards.append(Shard(slot.name, shape, Box.whole(shape), start, stop, values))
        return shards


def _blocks_of(bucket: Bucket, codings: Sequence[Coding]) -> Bucket:
    """The layout of a bucket's blocks: a slot has the shape (blocks,)."""
    slots = []
    offset = 0
    for slot, coding in zip(bucket.slots, codings, strict=True):
        slots.append(Slot(slot.name, slot.param, offset, torch.Size((coding.num_blocks,))))
        offset += coding.num_blocks
    return Bucket(bucket.name, tuple(slots), bucket.num_shards)


class CodedParameters(Zero3):
    """Frozen parameters that are kept in codes, beside the strategy of all others."""

    def __init__(
        self, units: Sequence[Unit], group: DataGroup, codings: Mapping[str, Coding]
    ) -> None:
        self._codings = codings
        self._coded: list[CodedBucket] = []
        super().__init__(units, group)

    def _frozen_bucket(self, bucket: Bucket) -> GatheredBucket:
        made = CodedBucket(bucket, self.group, self._taken, self._codings)
        self._coded.append(made)
        return made

    def decoded_shards(self) -> list[Shard]:
        return [shard for bucket in self._coded for shard in bucket.decoded()]


def separate_coded(
    units: Sequence[Unit], codings: Mapping[str, Coding]
) -> tuple[list[Unit], list[Unit]]:
    """The units without the parameters that are kept in codes, and units of these alone, which the
    same modules use.
    """
    plain: list[Unit] = []
    coded: list[Unit] = []
    known = {id(param) for unit in units for name, param in unit.params if name in codings}
    for unit in units:
        kept = [(name, param) for name, param in unit.params if name not in codings]
        apart = [(name, param) for name, param in unit.params if name in codings]
        plain.append(replace(unit, params=kept))
        users = [module for module in unit.modules if _uses(module, known, deep=unit.is_block)]
        if apart or users:
            coded.append(Unit(f"{unit.name} base", unit.is_block, apart, users, unit.keep))
    return plain, coded


def _uses(module: nn.Module, params: set[int], *, deep: bool) -> bool:
    """Whether a module, or with `deep` one in it, holds one of these parameters."""
    return any(id(param) in params for param in module.parameters(recurse=deep))
