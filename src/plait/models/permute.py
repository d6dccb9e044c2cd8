"""Rows in another order, and tokens as rows: gathers whose backward is a gather too.

Autograd's own backward of an index adds up row by row, as an index may name a row twice. Here it is
known how often each is named. That is once in a permutation, k times where each token goes to k
experts. So backward reads where it would have to add. Shapes: N tokens, R = N k rows, D features.
`order` [R]: which pair of a token and its j-th expert, n k + j, is in each row; `back` [R] is its
inverse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.values import AutogradContext


def counted(numbers: Tensor, size: int) -> Tensor:
    """How often each of 0 .. size - 1 is among `numbers` [N]: int64 [size]. Larger ones are left
    out.

    On a GPU `torch.bincount` has the host wait for the largest number. Comparing does not.

    >>> counted(torch.tensor([1, 0, 1, 3]), 3).tolist()
    [1, 2, 0]
    """
    if numbers.device.type == "cpu":
        return torch.bincount(numbers, minlength=size)[:size]
    return (numbers[:, None] == torch.arange(size, device=numbers.device)).sum(0)


def inverse(order: Tensor) -> Tensor:
    """The order [R] that undoes an order [R].

    >>> inverse(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def permute(rows: Tensor, order: Tensor, back: Tensor | None = None) -> Tensor:
    """rows[order], [R, D] -> [R, D]; `back` [R], the inverse of `order`, if it is known."""
    permuted: Tensor = _Permute.apply(rows, order, inverse(order) if back is None else back)
    return permuted


def to_rows(tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """tokens [N, D] -> [R, D]: each token in k rows, in the places that `order` [R] and its inverse
    `back` say.
    """
    rows: Tensor = _ToRows.apply(tokens, order, back)
    return rows


def add_up(rows: Tensor, weight: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """rows [R, D], weight [N, k] -> [N, D]: each token's rows, weighed; the way back from
    `to_rows`.
    """
    tokens: Tensor = _AddUp.apply(rows, weight, order, back)
    return tokens


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.back), None, None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back, ctx.num_tokens = back, len(tokens)
        return tokens.index_select(0, order // (len(order) // max(len(tokens), 1) or 1))

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = grads[0].index_select(0, ctx.back)
        return pairs.view(ctx.num_tokens, -1, pairs.shape[1]).sum(1), None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, rows: Tensor, weight: Tensor, order: Tensor, back: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, order, back)
        pairs = rows.index_select(0, back).view(*weight.shape, rows.shape[1])
        return torch.bmm(weight[:, None], pairs)[:, 0]

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, order, back = ctx.saved_tensors
        grad = grads[0]
        k = weight.shape[1]
        of_rows = grad.index_select(0, order // k) * weight.reshape(-1)[order, None]
        pairs = rows.index_select(0, back).view(*weight.shape, rows.shape[1])
        return of_rows, torch.bmm(pairs, grad[..., None])[..., 0], None, None
