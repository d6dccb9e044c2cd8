"""Sums of rows: right, in order, in blocks, in place, with halves accumulated in float32."""

from __future__ import annotations

import pytest
import torch

from plait.comm.backends.sums import BLOCK_BYTES, sum_into


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
)
@pytest.mark.parametrize("num_rows", [2, 3, 5])
@pytest.mark.parametrize("numel", [0, 1, BLOCK_BYTES // 2 + 3])
def test_sums(dtype, num_rows, numel):
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(numel, generator=generator) * 8).to(dtype) for _ in range(num_rows)]
    wide = torch.float32 if dtype in {torch.bfloat16, torch.float16} else dtype
    expected = rows[0].to(wide)
    for row in rows[1:]:
        expected = expected + row
    out = torch.empty(numel, dtype=dtype)
    sum_into(out, rows)
    assert torch.equal(out, expected.to(dtype))
    for index in range(num_rows):  # `out` may be any of the rows
        rows_again = [row.clone() for row in rows]
        sum_into(rows_again[index], rows_again)
        assert torch.equal(rows_again[index], out)
