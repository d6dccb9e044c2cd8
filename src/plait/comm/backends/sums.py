"""Sums of the same range in several memories, in one order and with one rounding, wherever they are
computed.

Sums of more than two work in blocks that stay in the cache. So the running sum passes through
memory only once. Halves are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.paths import Paths

BLOCK_BYTES = 128 << 10
HALVES = frozenset({torch.bfloat16, torch.float16})


def sum_into(out: Tensor, rows: Sequence[Tensor], paths: Paths | None = None) -> None:
    """`out = ((rows[0] + rows[1]) + rows[2]) + ...`, all (n,), at least two rows; `out` may be one
    of the rows. `paths` may set the size of a block, in bytes.
    """
    if len(rows) == 2:  # torch adds two halves in float32, too
        torch.add(rows[0], rows[1], out=out)
        return
    wide = torch.float32 if out.dtype in HALVES else out.dtype
    paths = paths or Paths()
    block = max(1, paths.limit("sum_block_bytes", BLOCK_BYTES) // wide.itemsize)
    paths.note("sum_block_bytes", out.numel() > block)
    running = torch.empty(min(block, out.numel()), dtype=wide, device=out.device)
    for start in range(0, out.numel(), block):
        stop = min(start + block, out.numel())
        total = running[: stop - start]
        torch.add(rows[0][start:stop].to(wide), rows[1][start:stop], out=total)
        for row in rows[2:-1]:
            total.add_(row[start:stop])
        if wide != out.dtype:
            out[start:stop].copy_(total.add_(rows[-1][start:stop]))
        else:
            torch.add(total, rows[-1][start:stop], out=out[start:stop])
