"""Eight-bit sums: an all-reduce whose both halves send one byte an element, with the rounding fed back.

    1. worker: what it wants to send plus what rounding kept back last time; rounded to int8, shard k sent to rank k
    2. rank k: the sum of all parts of shard k plus what rounding kept back there; rounded to int8, gathered by all

Both errors are remembered and added to the next sum, so that nothing is lost for good (error feedback: H. Tang et al.,
1-bit Adam, ICML 2021, section 3; F. Seide et al., Interspeech 2014). `BLOCK` elements share one float32 scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm import Axis

BLOCK = 256
LEVELS = 127


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes (n,), float32 scales (ceil(n / BLOCK),)) of `values` (n,); the largest of a block becomes +-127."""
    blocks = _blocks(values)
    scales = (blocks.abs().amax(dim=1) / LEVELS).float()
    safe = torch.where(scales > 0, scales, torch.ones_like(scales)).to(values.dtype)
    codes = (blocks / safe[:, None]).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return codes.view(-1)[: values.numel()].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that the codes stand for, (n,)."""
    return (_blocks(codes.to(dtype)) * scales.to(dtype)[:, None]).view(-1)[: codes.numel()]


def _blocks(values: Tensor) -> Tensor:
    missing = -values.numel() % BLOCK
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, BLOCK)


class Int8Sum:
    """Sums one flat buffer of `numel` elements (a multiple of the axis) over the axis, again and again."""

    def __init__(self, axis: Axis, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._axis = axis
        self.worker_error = torch.zeros(numel, dtype=dtype, device=device)
        self.shard_error = torch.zeros(numel // axis.size, dtype=dtype, device=device)

    def flush(self) -> Tensor:
        """What rounding has kept back on all ranks, summed exactly; nothing is kept back from here on. Collective."""
        axis, kept = self._axis, self.worker_error.clone()
        kept.view(axis.size, -1)[axis.rank] += self.shard_error
        axis.all_reduce(kept).wait()
        self.worker_error.zero_()
        self.shard_error.zero_()
        return kept

    def sum(self, flat: Tensor) -> None:
        """Replace `flat` by the sum over the axis, up to rounding that the next sum makes good. Collective."""
        axis, dtype = self._axis, flat.dtype
        self.worker_error += flat
        parts = [quantize(part) for part in self.worker_error.tensor_split(axis.size)]
        codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
        sent = torch.cat([dequantize(*part, dtype) for part in parts])
        self.worker_error -= sent
        arrived_codes, arrived_scales = torch.empty_like(codes), torch.empty_like(scales)
        works = [axis.all_to_all(arrived_codes, codes), axis.all_to_all(arrived_scales, scales)]
        for work in works:
            work.wait()
        for part_codes, part_scales in zip(arrived_codes.chunk(axis.size), arrived_scales.chunk(axis.size), strict=True):
            self.shard_error += dequantize(part_codes, part_scales, dtype)
        own_codes, own_scales = quantize(self.shard_error)
        self.shard_error -= dequantize(own_codes, own_scales, dtype)
        works = [axis.all_gather(codes, own_codes), axis.all_gather(scales, own_scales)]
        for work in works:
            work.wait()
        pairs = zip(codes.chunk(axis.size), scales.chunk(axis.size), strict=True)
        flat.copy_(torch.cat([dequantize(part_codes, part_scales, dtype) for part_codes, part_scales in pairs]))
