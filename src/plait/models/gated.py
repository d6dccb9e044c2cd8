"""Gated MLPs of many experts, down(silu(gate(x)) * up(x)), in one function of their rows.

The plain way is three grouped products with elementwise steps between, each over all rows at once: what is between goes to
memory and back, and most of it stays for backward. `_ByChunk` takes the rows of one expert a few hundred at a time, so that
what lies between the products stays in cache, and keeps the outputs of gate and up alone, 2 of the 5 tensors [R, I]: silu and
the products with it are computed again, without a matrix product.
Shapes: R rows sorted by expert, D features, I inner features, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.models.grouped import grouped_product

CHUNK_ROWS = 512  # 1 MiB of 512 inner features in float32: about a second-level cache, and enough rows for a full-speed product


def gated_experts(rows: Tensor, weights: Sequence[Tensor], counts: Sequence[int], method: str) -> Tensor:
    """rows [R, D], weights gate and up [E, I, D] and down [E, D, I], counts (E numbers that sum to R) -> [R, D].

    `method`: of the grouped product (see `grouped`). `loop` goes chunk by chunk, but for half precision, in which sums over
    chunks would be rounded between them.
    """
    gate, up, down = weights
    if method == "loop" and rows.element_size() >= 4:
        output: Tensor = _ByChunk.apply(rows, gate, up, down, tuple(counts))
        return output
    inner = F.silu(grouped_product(rows, gate, counts, method)) * grouped_product(rows, up, counts, method)
    return grouped_product(inner, down, counts, method)


class _ByChunk(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # as autograd calls it
        ctx: Any, rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: tuple[int, ...]
    ) -> Tensor:
        gated, raised = (rows.new_empty(len(rows), gate.shape[1]) for _ in range(2))
        out, room = rows.new_empty(len(rows), down.shape[1]), _room(gated, counts, 1)
        for expert, part in _chunks(counts):
            torch.mm(rows[part], gate[expert].t(), out=gated[part])
            torch.mm(rows[part], up[expert].t(), out=raised[part])
            (inner,) = _of(room, part)
            torch.ops.aten.silu.out(gated[part], out=inner)
            torch.mm(inner.mul_(raised[part]), down[expert].t(), out=out[part])
        ctx.save_for_backward(rows, gate, up, down, gated, raised)
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate, up, down, gated, raised = ctx.saved_tensors
        grad, counts = grads[0].contiguous(), ctx.counts
        of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        of_weights = [_Sums(w, counts) if ctx.needs_input_grad[1 + i] else None for i, w in enumerate((gate, up, down))]
        room = _room(gated, counts, 4)
        for expert, part in _chunks(counts):
            inner, of_inner, of_gated, of_raised = _of(room, part)
            torch.mm(grad[part], down[expert], out=of_inner)
            torch.ops.aten.silu.out(gated[part], out=inner)
            torch.mul(of_inner, inner, out=of_raised)
            inner.mul_(raised[part])
            of_inner.mul_(raised[part])
            torch.ops.aten.silu_backward.grad_input(of_inner, gated[part], grad_input=of_gated)
            if of_rows is not None:
                torch.mm(of_gated, gate[expert], out=of_rows[part])
                of_rows[part].addmm_(of_raised, up[expert])
            pairs = ((of_gated, rows[part]), (of_raised, rows[part]), (grad[part], inner))
            for sums, (left, right) in zip(of_weights, pairs, strict=True):
                if sums is not None:
                    sums.add(expert, left, right)
        return of_rows, *(None if sums is None else sums.total for sums in of_weights), None


class _Sums:
    """The gradient of a weight [E, out, in]: left^T right of each expert's chunks, zeros for one that got nothing."""

    def __init__(self, weight: Tensor, counts: Sequence[int]) -> None:
        self.total = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self._begun = [False] * len(counts)
        for expert, count in enumerate(counts):
            if not count:
                self.total[expert].zero_()

    def add(self, expert: int, left: Tensor, right: Tensor) -> None:
        if self._begun[expert]:
            self.total[expert].addmm_(left.t(), right)
        else:
            torch.mm(left.t(), right, out=self.total[expert])
        self._begun[expert] = True


def _chunks(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its next rows), over all rows; the chunks of an expert differ by a row at most."""
    start = 0
    for expert, count in enumerate(counts):
        number = -(-count // CHUNK_ROWS)
        for index in range(number):
            yield expert, slice(start + count * index // number, start + count * (index + 1) // number)
        start += count


def _room(like: Tensor, counts: Sequence[int], number: int) -> list[Tensor]:
    """Buffers that all chunks share, each [longest chunk, I]."""
    longest = min(max(counts, default=0), CHUNK_ROWS)
    return [like.new_empty(longest, like.shape[1]) for _ in range(number)]


def _of(room: Sequence[Tensor], part: slice) -> list[Tensor]:
    return [buffer[: part.stop - part.start] for buffer in room]
