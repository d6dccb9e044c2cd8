"""Eight-bit sums: an all-reduce whose both halves send one byte an element, with the rounding fed
back.

    1. worker: its contribution plus the rounding error of last time; rounded to int8, shard k sent
    to rank k
    2. rank k: the sum of all parts of shard k plus its rounding error there; rounded to int8,
    gathered by all

Both errors are remembered and added to the next sum, so that nothing is lost for good (error
feedback: H. Tang et al., 1-bit Adam, ICML 2021, section 3; F. Seide et al., Interspeech 2014).
`BLOCK` elements share one float32 scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm import Axis

BLOCK = 256
LEVELS = 127


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes (n,), float32 scales (ceil(n / BLOCK),)) of `values` (n,); the largest of a block
    becomes +-127.
    """
    blocks = _blocks(values)
    scales = (blocks.abs().amax(dim=1) / LEVELS).float()
    safe = torch.where(scales > 0, scales, torch.ones_like(scales)).to(values.dtype)
    codes = (blocks / safe[:, None]).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return codes.view(-1)[: values.numel()].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values (n,) that the codes (n,) stand for, with the scales (ceil(n / BLOCK),) of their
    blocks.
    """
    return (_blocks(codes.to(dtype)) * scales.to(dtype)[:, None]).view(-1)[: codes.numel()]


def _blocks(values: Tensor) -> Tensor:
    missing = -values.numel() % BLOCK
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, BLOCK)


class Int8Sum:
    """Sums one flat buffer of `numel` elements over the axis, again and again.

    Its errors are replaced, never written into. So a copy of this object is a way back to its
    state.
    """

    def __init__(self, axis: Axis, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._axis = axis
        self._numel = numel
        self._begin(torch.zeros(numel, dtype=dtype, device=device))

    def _begin(self, kept: Tensor) -> None:
        """Keep back `kept` (numel,), in the shards of the axis as it is now."""
        self._size = self._axis.size
        self._rank = self._axis.rank
        self.worker_error = torch.nn.functional.pad(kept, (0, -self._numel % self._size))
        self.shard_error = self.worker_error.new_zeros(self.worker_error.numel() // self._size)

    def regroup(self) -> None:
        """The axis has become one of other ranks. This rank's rounding error of its shard becomes
        its own error again.
        """
        if (self._size, self._rank) != (self._axis.size, self._axis.rank):
            self._begin(self._kept()[: self._numel])

    def forget(self) -> None:
        """Keep nothing back from here on: the errors were of values that are gone."""
        self._begin(torch.zeros_like(self._kept()[: self._numel]))

    def flush(self) -> Tensor:
        """The rounding errors kept back on all ranks, (numel,), summed exactly; nothing is kept
        back from here on. Collective.
        """
        kept = self._kept()
        self._axis.all_reduce(kept).wait()
        self._begin(torch.zeros_like(kept[: self._numel]))
        return kept[: self._numel]

    def _kept(self) -> Tensor:
        kept = self.worker_error.clone()
        kept.view(self._size, -1)[self._rank] += self.shard_error
        return kept

    def sum(self, flat: Tensor) -> None:
        """Replace `flat` (numel,) by the sum over the axis, up to rounding that the next sum makes
        good. Collective.
        """
        axis = self._axis
        dtype = flat.dtype
        size = self._size
        wanted = self.worker_error + torch.nn.functional.pad(flat, (0, -self._numel % size))
        parts = [quantize(part) for part in wanted.tensor_split(size)]
        codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
        worker_error = wanted - torch.cat([dequantize(*part, dtype) for part in parts])
        arrived_codes = torch.empty_like(codes)
        arrived_scales = torch.empty_like(scales)
        works = [axis.all_to_all(arrived_codes, codes), axis.all_to_all(arrived_scales, scales)]
        for work in works:
            work.wait()
        shard_error = self.shard_error
        for part_codes, part_scales in zip(
            arrived_codes.chunk(size), arrived_scales.chunk(size), strict=True
        ):
            shard_error = shard_error + dequantize(part_codes, part_scales, dtype)
        own_codes, own_scales = quantize(shard_error)
        shard_error = shard_error - dequantize(own_codes, own_scales, dtype)
        works = [axis.all_gather(codes, own_codes), axis.all_gather(scales, own_scales)]
        for work in works:
            work.wait()
        self.worker_error = worker_error
        self.shard_error = shard_error
        pairs = zip(codes.chunk(size), scales.chunk(size), strict=True)
        flat.copy_(torch.cat([dequantize(*pair, dtype) for pair in pairs])[: self._numel])
