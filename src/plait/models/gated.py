"""Gated MLPs of many experts, down(silu(gate(x)) * up(x)), in one function of their rows.

The plain way is three grouped products with elementwise steps between, each over all rows at once.
Intermediate results go to memory and back, and most of them stay for backward. `_ByChunk` takes the
rows of one expert a few hundred at a time, so intermediate results stay in cache. It keeps the
outputs of gate and up alone, 2 of the 5 tensors [R, I]. silu and the products with it are computed
again, without a matrix product. It multiplies with the quicker library (`plait.products`). Shapes:
R rows sorted by expert, D features, I inner features, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.models.grouped import METHODS, grouped_product, kernel_takes
from plait.products import Products
from plait.values import AutogradContext

# 1 MiB of 512 inner features in float32: about a second-level cache, and enough rows for a
# full-speed product
CHUNK_ROWS = 512
STEP_ROWS = 64
TORCH = Products("torch")


def gated_experts(
    rows: Tensor,
    weights: Sequence[Tensor],
    counts: Sequence[int],
    method: str,
    products: Products | None = None,
) -> Tensor:
    """rows [R, D], weights gate and up [E, I, D] and down [E, D, I], counts (E numbers that sum to
    R) -> [R, D].

    `method`: of the grouped product (see `grouped`). `loop` goes chunk by chunk and multiplies by
    `products`, or by rule where that is None. Half precision is not chunked, since sums over chunks
    would be rounded between them.
    """
    gate, up, down = weights
    if method == "loop" and rows.element_size() >= 4:
        output: Tensor = _ByChunk.apply(rows, gate, up, down, tuple(counts), products or Products())
        return output
    inner = F.silu(grouped_product(rows, gate, counts, method)) * grouped_product(
        rows, up, counts, method
    )
    return grouped_product(inner, down, counts, method)


def measure(
    weight: Tensor, counts: Sequence[int], repeats: int = 3, products: Products | None = None
) -> dict[str, float]:
    """Seconds of each method that can run, forward and backward, on experts like `weight` [E, I,
    D]: the best of `repeats`.

    `counts`: the rows of each of the E experts.
    """
    inputs = [
        weight.new_empty(sum(counts), weight.shape[2]),
        *(torch.empty_like(weight) for _ in range(2)),
        weight.mT,
    ]
    rows, *weights = (
        torch.randn_like(one, memory_format=torch.contiguous_format).requires_grad_()
        for one in inputs
    )
    by_method = {}
    for method in METHODS:
        if method == "kernel" and not kernel_takes(weight):
            continue
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            gated_experts(rows, weights, counts, method, products).sum().backward()
            if weight.device.type == "cuda":
                torch.cuda.synchronize(weight.device)
            seconds.append(time.perf_counter() - began)
        by_method[method] = min(seconds[1:])
    return by_method


class _ByChunk(torch.autograd.Function):
    @staticmethod
    def forward(  # as autograd calls it  # noqa: PLR0917
        ctx: AutogradContext,
        rows: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        counts: tuple[int, ...],
        products: Products,
    ) -> Tensor:
        out = rows.new_empty(len(rows), down.shape[1])
        kept = []
        for expert, part, by in _chunks(counts, products):
            gated, raised = (by.linear(rows[part], weight[expert], None) for weight in (gate, up))
            out[part] = by.linear(F.silu(gated).mul_(raised), down[expert], None)
            kept += [gated, raised]
        ctx.save_for_backward(rows, gate, up, down, *kept)
        ctx.counts = counts
        ctx.products = products
        return out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate, up, down, *saved = ctx.saved_tensors
        grad = grads[0].contiguous()
        counts = ctx.counts
        wanted = ctx.needs_input_grad
        of_rows = torch.empty_like(rows) if wanted[0] else None
        of_weights = [
            _Sums(weight, counts) if wanted[1 + i] else None
            for i, weight in enumerate((gate, up, down))
        ]
        for (expert, part, by), gated, raised in zip(
            _chunks(counts, ctx.products), saved[::2], saved[1::2], strict=True
        ):
            of_inner = by.product(grad[part], down[expert])
            inner = F.silu(gated)
            of_raised = of_inner * inner
            of_gated = torch.ops.aten.silu_backward(of_inner.mul_(raised), gated)
            inner.mul_(raised)
            if of_rows is not None:
                of_rows[part] = by.product(of_gated, gate[expert]).add_(
                    by.product(of_raised, up[expert])
                )
            for sums, left, right in zip(
                of_weights,
                (of_gated, of_raised, grad[part]),
                (rows[part], rows[part], inner),
                strict=True,
            ):
                if sums is not None:
                    sums.add(expert, by.summed(left.t(), right), left, right)
        return of_rows, *(None if sums is None else sums.total for sums in of_weights), None, None


class _Sums:
    """The gradient of a weight [E, out, in]: left^T right of each expert's chunks, zeros for one
    that got nothing.
    """

    def __init__(self, weight: Tensor, counts: Sequence[int]) -> None:
        self.total = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self._begun = [False] * len(counts)
        for expert, count in enumerate(counts):
            if not count:
                self.total[expert].zero_()

    def add(self, expert: int, made: Tensor | None, left: Tensor, right: Tensor) -> None:
        """`made` is the product, if it has been made; else it is added in place."""
        total = self.total[expert]
        begun = self._begun[expert]
        if made is not None:
            total.add_(made) if begun else total.copy_(made)
        elif begun:
            total.addmm_(left.t(), right)
        else:
            torch.mm(left.t(), right, out=total)
        self._begun[expert] = True


def _chunks(counts: Sequence[int], products: Products) -> Iterator[tuple[int, slice, Products]]:
    """(expert, its next rows, who multiplies them), over all rows.

    A library that compiles a kernel for each shape keeps half a megabyte of it. Routing makes other
    counts at every step. So `products` get multiples of `STEP_ROWS`, and what is left of an expert
    is torch's.
    """
    paths = products.paths
    most = paths.limit("expert_chunk_rows", CHUNK_ROWS)
    step = paths.limit("expert_step_rows", STEP_ROWS)
    start = 0
    for expert, count in enumerate(counts):
        end = start + count
        paths.note("expert_chunk_rows", count > most)
        while start < end:
            rows = min(end - start, most)
            even = rows // step * step
            paths.note("expert_step_rows", even > 0)
            stop = start + (even or rows)
            yield expert, slice(start, stop), products if even else TORCH
            start = stop
