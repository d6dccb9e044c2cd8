"""Torch's attention of several heads: each rank computes some of them.

    Q, K, V = x W_q^T + b_q, x W_k^T + b_k, x W_v^T + b_v          of this rank's heads
    heads   = softmax(Q K^T / sqrt(head_size) + mask) V
    y       = heads W_o^T + b_o                                    a row: summed over ranks

A. Vaswani et al., Attention Is All You Need (2017), section 3.2.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import Axis
from plait.comm.functional import transition
from plait.mesh.layouts import INVARIANT, PARTIAL, REPLICATED, Sharded
from plait.parallel.tensor.dropout import mask_like
from plait.parallel.tensor.group import ForwardContext
from plait.parallel.tensor.mode import LinearRule


class SplitAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with this rank's part of `in_proj_weight`, and `out_proj` a row."""

    def bind(self, column: LinearRule, context: ForwardContext) -> None:
        """Compute as a column does. The fused forwards of torch take whole weights: none runs."""
        assert column.target.features is not None  # the axis that cuts the heads
        self._column = column
        self._context = context
        self._axis: Axis = column.target.features
        self._qkv_same_embed_dim = False

    def forward(  # noqa: PLR0917 (as the module that it stands for is called)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention as torch's module computes it, with its arguments. Collective; differentiable.

        Args:
            query: [batch, queries, width] with `batch_first`, else [queries, batch, width]; one
                sample has no dim of the batch. So have `key` and `value`, with keys for queries.
            key_padding_mask: [batch, keys]: true, or what is added, where a key is not seen.
            need_weights: whether the weights of the heads are returned too.
            attn_mask: [queries, keys], or [batch * all heads, queries, keys].

        Returns:
            The output has the shape of `query`. The weights are a mean [batch, queries, keys], or
            [batch, all heads, queries, keys]. They are None unless needed.
        """
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))
        mask = self._mask(q, attn_mask, key_padding_mask)
        if need_weights or (self.training and self.dropout > 0.0):
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            if self.training and self.dropout > 0.0:
                weights = weights * mask_like(weights, self.dropout, self._context, 1)
            mixed = weights @ v
        else:
            weights = None
            causal = is_causal and key_padding_mask is None
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None if causal else mask, is_causal=causal
            )
        output = self.out_proj(mixed.permute(2, 0, 1, 3).flatten(-2))
        if query.dim() == 2:
            output = output.squeeze(1)
        elif self.batch_first:  # in memory time comes first, as torch has it: masks are drawn so
            output = output.transpose(0, 1)
        if not need_weights or weights is None:
            return output, None
        weights = self._of_all_heads(weights, averaged=average_attn_weights)
        return output, weights.squeeze(0) if query.dim() == 2 else weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Q, K and V [..., width / ranks]; inputs that are one tensor are multiplied at once."""
        if query is key and key is value:
            return self._product(query, 0, 3).chunk(3, -1)
        if key is value:
            return (self._product(query, 0, 1), *self._product(key, 1, 3).chunk(2, -1))
        return tuple(self._product(x, i, i + 1) for i, x in enumerate((query, key, value)))

    def _product(self, x: Tensor, first: int, last: int) -> Tensor:
        part = self.in_proj_weight.shape[0] // 3
        rows = slice(first * part, last * part)
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        y = self._column.product(x, self.in_proj_weight[rows], bias, self._context)
        self._context.layout = self._column.target
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, heads of this rank, positions, head_size] of Q, K or V."""
        if x.dim() == 2:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(self, q: Tensor, attended: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """A mask to add to the scores [batch, heads of this rank, queries, keys], or None.

        The gradient of a mask that is learned is a sum over the ranks, as each has some heads.
        """
        attended, padding = (self._summed_backward(one) for one in (attended, padding))
        mask = None
        if attended is not None:
            mask = _added(attended, q)
            if mask.dim() == 3:
                mine = q.shape[1]
                per_head = mask.unflatten(0, (-1, self.num_heads if len(mask) > 1 else 1))
                first = self._axis.rank * mine
                mask = per_head[:, first : first + mine] if len(mask) > 1 else per_head
        if padding is not None:
            by_key = _added(padding.view(-1, 1, 1, padding.shape[-1]), q)
            mask = by_key if mask is None else mask + by_key
        return mask

    def _summed_backward(self, mask: Tensor | None) -> Tensor | None:
        if mask is None or not mask.requires_grad:
            return mask
        return transition(mask, self._axis, INVARIANT, REPLICATED)

    def _of_all_heads(self, weights: Tensor, *, averaged: bool) -> Tensor:
        if not averaged:
            return transition(weights, self._axis, Sharded(1), INVARIANT)
        return transition(weights.sum(1) / self.num_heads, self._axis, PARTIAL, INVARIANT)


def _added(mask: Tensor, q: Tensor) -> Tensor:
    """A mask as numbers that are added: true is minus infinity."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
