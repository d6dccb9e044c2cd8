"""The grouped matrix product: rows that are sorted by group, each group times a matrix of its own.

Three ways to equal numbers: torch's own kernel, a loop over groups, one batched product over padded
groups. The fastest depends on device, dtype, sizes and skew. `default_method` is a rule of thumb;
`gated.measure` measures. Shapes: R rows, I inputs, O outputs, E groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.torch_internals import numbers_on
from plait.values import AutogradContext

METHODS = ("kernel", "loop", "padded")


def grouped_product(
    rows: Tensor, weight: Tensor, counts: Sequence[int], method: str = "loop"
) -> Tensor:
    """rows [R, I], weight [E, O, I], counts (E numbers that sum to R) -> [R, O]: row r times the
    weight of its group.

    A weight whose group is empty, and every weight when there are no rows, has a gradient of zeros.
    """
    output: Tensor = _GroupedProduct.apply(rows, weight, tuple(counts), method)
    return output


def default_method(weight: Tensor) -> str:
    """The method for `weight` [E, O, I]: the kernel where starting a product costs more than a
    small one takes. Elsewhere the loop, which gated experts chunk.
    """
    return "kernel" if weight.device.type == "cuda" and kernel_takes(weight) else "loop"


def kernel_takes(weight: Tensor) -> bool:
    """Whether torch's grouped product takes rows of this dtype and sizes: `weight` is [E, O, I],
    with strides of a multiple of 16 bytes.
    """
    if not hasattr(F, "grouped_mm"):
        return False
    if weight.dtype not in (torch.float32, torch.bfloat16) or (
        weight.device.type == "cuda" and weight.dtype != torch.bfloat16
    ):
        return False
    return all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, rows: Tensor, weight: Tensor, counts: tuple[int, ...], method: str
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        ctx.method = method
        return _times(rows, weight.transpose(1, 2), counts, method)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        rows_grad = (
            _times(grad, weight, ctx.counts, ctx.method) if ctx.needs_input_grad[0] else None
        )
        weight_grad = (
            _outer(grad, rows, weight, ctx.counts, ctx.method) if ctx.needs_input_grad[1] else None
        )
        return rows_grad, weight_grad, None, None


def _times(rows: Tensor, weight: Tensor, counts: tuple[int, ...], method: str) -> Tensor:
    """rows [R, I], weight [E, I, O] -> [R, O]."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    if rows.shape[0] == 0:
        return out
    if method == "kernel":
        return F.grouped_mm(rows.contiguous(), weight, offs=_ends(counts, rows.device))
    if method == "padded":
        return _unpad(_pad(rows, counts) @ weight, counts)
    start = 0
    for index, count in enumerate(counts):
        if count:
            torch.mm(rows[start : start + count], weight[index], out=out[start : start + count])
            start += count
    return out


def _outer(
    grad: Tensor, rows: Tensor, weight: Tensor, counts: tuple[int, ...], method: str
) -> Tensor:
    """grad [R, O], rows [R, I] -> [E, O, I]."""
    if rows.shape[0] == 0:
        return torch.zeros_like(weight)
    if method == "kernel":
        made = F.grouped_mm(grad.t(), rows.contiguous(), offs=_ends(counts, rows.device))
        for index, count in enumerate(counts):
            if count == 0:
                made[index].zero_()
        return made
    if method == "padded":
        return _pad(grad, counts).transpose(1, 2) @ _pad(rows, counts)
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    start = 0
    for index, count in enumerate(counts):
        if count:
            torch.mm(grad[start : start + count].t(), rows[start : start + count], out=out[index])
            start += count
        else:
            out[index].zero_()
    return out


def _ends(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return numbers_on(device, list(accumulate(counts)), torch.int32)


def _pad(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
    """[R, I] -> [E, longest, I], zeros behind each group."""
    out = rows.new_zeros(len(counts), max(counts), rows.shape[1])
    for index, part in enumerate(rows.split(counts)):
        out[index, : len(part)] = part
    return out


def _unpad(padded: Tensor, counts: tuple[int, ...]) -> Tensor:
    return torch.cat([padded[index, :count] for index, count in enumerate(counts)])
