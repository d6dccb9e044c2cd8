"""A frozen base in 8 or 4 bits: numbers of a code book, and a scale for each block of 64.

    nf4     a block's numbers are code[i] * scale, 16 codes      Dettmers et al., "QLoRA" (2023)
    int8    the same with 256 codes                               Dettmers et al. (2021)

The library bitsandbytes makes the codes and reads them. A block is 64 numbers of one row of the
weight, so no cut of a weight changes its numbers. Where a cut goes through a block, both sides keep
the whole of it.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.errors import ModelError

FORMATS = ("int8", "nf4")
BLOCK = 64
"""The numbers that share a scale."""
Spans = tuple[tuple[int, int], ...]
"""Parts of a dimension: the first index and the length of each."""


def library() -> Any:
    """The functions of bitsandbytes. Errors: `ModelError` where it is not installed."""
    told = logging.getLogger("bitsandbytes")
    level = told.level
    told.setLevel(logging.ERROR)  # it tells of kernels for layers that are not used here
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as failure:
        raise ModelError(
            "adapter.base in 8 or 4 bits needs the library bitsandbytes, which does not load "
            f"({failure}); pip install 'plait[quantised]', or leave adapter.base out"
        ) from failure
    finally:
        told.setLevel(level)


def bytes_of_number(kind: str) -> float:
    """The bytes of a number of a whole block: its code, and its part of the float32 scale."""
    return (0.5 if kind == "nf4" else 1.0) + 4 / BLOCK


class PlaceInWhole(Protocol):
    """Where a rank's part of a weight lies: a box of `view`, which is `shape` with fused parts
    apart.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def view(self) -> tuple[int, ...]: ...

    @property
    def box(self) -> Any: ...


@dataclass(frozen=True)
class CodedWeight:
    """How this rank's part [rows, columns] of a weight is kept: codes and scales, block by block.

    `rows` and `columns` are spans of the whole weight's. Blocks start at multiples of 64 columns.
    """

    kind: str
    rows: Spans
    columns: Spans

    @staticmethod
    def of(kind: str, shape: Sequence[int], place: PlaceInWhole | None) -> CodedWeight:
        """The layout of a weight of two dimensions, or of this rank's part of it."""
        if place is None:
            return CodedWeight(kind, ((0, shape[0]),), ((0, shape[1]),))
        split = 1 if place.view[0] == place.shape[0] else 2
        rows, columns = (
            _spans(place.view[part], place.box.offset[part], place.box.extent[part])
            for part in (slice(split), slice(split, None))
        )
        return CodedWeight(kind, rows, columns)

    @property
    def code_bytes(self) -> int:
        """The bytes of the codes of a block."""
        return BLOCK // 2 if self.kind == "nf4" else BLOCK

    @functools.cached_property
    def num_blocks(self) -> int:
        """The blocks that the part touches."""
        return sum(length for _, length in self.rows) * len(self._kept)

    @functools.cached_property
    def _kept(self) -> list[slice]:
        """The columns that are kept of each block of a row."""
        kept = []
        for start, length in self.columns:
            first, last = _covering((start, length))
            for block in range(first, last, BLOCK):
                low = max(start, block) - block
                kept.append(slice(low, min(start + length, block + BLOCK) - block))
        return kept

    def start_of(self, block: int) -> int:
        """How many numbers of the part, row by row, come before a block."""
        lengths = [columns.stop - columns.start for columns in self._kept]
        row, inside = divmod(block, len(lengths))
        return row * sum(lengths) + sum(lengths[:inside])

    @torch.no_grad()
    def encode(self, whole: Tensor) -> Tensor:
        """The bytes of this rank's part of the weight `whole` [all rows, all columns]: the codes of
        all blocks, then their scales.
        """
        functions = library()
        mine = torch.cat([whole[first : first + length] for first, length in self.rows])
        blocks = torch.cat([_blocks(mine, span) for span in self.columns], dim=1)
        if self.kind == "nf4":
            codes, state = functions.quantize_4bit(blocks, blocksize=BLOCK, quant_type="nf4")
        else:
            book = _book(blocks.device)
            codes, state = functions.quantize_blockwise(blocks, code=book, blocksize=BLOCK)
        scales = state.absmax.float().contiguous()
        return torch.cat([codes.reshape(-1).view(torch.uint8), scales.view(torch.uint8)])

    @torch.no_grad()
    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the numbers of all blocks into `out` [rows, columns].

        `codes` (num_blocks * code_bytes,) are bytes, `scales` (num_blocks,) are float32.
        """
        blocks = self._numbers(codes, scales, out.dtype)
        rows = blocks.view(out.shape[0], -1)
        if rows.shape == out.shape:
            out.copy_(rows)
            return
        column = 0
        for number, kept in enumerate(self._kept):
            length = kept.stop - kept.start
            start = number * BLOCK + kept.start
            out[:, column : column + length].copy_(rows[:, start : start + length])
            column += length

    @torch.no_grad()
    def part(self, codes: Tensor, scales: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """The numbers (n,) of the part in some blocks from the block `first` on."""
        numbers = self._numbers(codes, scales, dtype).to(dtype)
        kept = torch.zeros((len(self._kept), BLOCK), dtype=torch.bool, device=codes.device)
        for block, columns in enumerate(self._kept):
            kept[block, columns] = True
        which = torch.arange(first, first + len(scales), device=codes.device) % len(self._kept)
        return numbers[kept[which]]

    def _numbers(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """All numbers of some blocks [blocks, 64]; for float64 in float32, which has them."""
        functions = library()
        shape = torch.Size((len(scales), BLOCK))
        narrow = torch.float32 if dtype == torch.float64 else dtype
        numbers: Tensor
        if self.kind == "nf4":
            book = functions.get_4bit_type("nf4", device=codes.device)
            state = functions.QuantState(scales, shape, book, BLOCK, "nf4", narrow)
            numbers = functions.dequantize_4bit(codes.view(-1, 1), state)
        else:
            book = _book(codes.device)
            state = functions.QuantState(scales, shape, book, BLOCK, dtype=narrow)
            numbers = functions.dequantize_blockwise(codes.view(shape), state)
        return numbers


@functools.cache
def _book(device: torch.device) -> Tensor:
    """The library's own code book of 8 bits [256]."""
    book: Tensor = library().create_dynamic_map().to(device)
    return book


def _spans(sizes: Sequence[int], offset: Sequence[int], extent: Sequence[int]) -> Spans:
    """The parts of a dimension, of one part or of fused ones, that a box takes."""
    if len(sizes) == 1:
        return ((offset[0], extent[0]),)
    parts = range(offset[0], offset[0] + extent[0])
    return tuple((part * sizes[1] + offset[1], extent[1]) for part in parts)


def _covering(span: tuple[int, int]) -> tuple[int, int]:
    """The first column of the blocks that a span touches, and that after them."""
    first, length = span
    return first // BLOCK * BLOCK, -(-(first + length) // BLOCK) * BLOCK


def _blocks(rows: Tensor, span: tuple[int, int]) -> Tensor:
    """The blocks of rows [rows, all columns] that a span of columns touches, in float32; what lies
    after the last column is zero.
    """
    first, last = _covering(span)
    part = rows[:, first:last].float()
    return nn.functional.pad(part, (0, last - first - part.shape[1])).contiguous()


def coded_parts(
    formats: Mapping[str, str],
    shapes: Mapping[str, Sequence[int]],
    places: Mapping[str, PlaceInWhole],
) -> dict[str, CodedWeight]:
    """How this rank's parts of weights are kept, by name. `shapes` are of whole weights, and
    `places` of those that are cut.
    """
    return {
        name: CodedWeight.of(kind, shapes[name], places.get(name)) for name, kind in formats.items()
    }
