"""The layers that the language models share, and the checks of their sizes.

`Linear` and `Embedding` differ from torch's own in `reset_parameters`, which draws from a normal
distribution of a given width. So an engine can give each module its values alone, in any order,
from a seed of its own. Attention without its projections is a module. A strategy that splits the
sequence can put its own in that place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import ModelError


def start_normal(weight: Tensor, std: float) -> None:
    """Draw a weight [...] from the default generator. On the meta device there is nothing to draw,
    and torch would load its symbolic shapes to find that out.
    """
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class Linear(nn.Linear):
    """A linear layer [..., in] -> [..., out] whose weight starts normal with `std`, and its bias at
    zero.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, std: float = 0.02
    ) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight from the default generator; zero the bias."""
        start_normal(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding [...] -> [..., hidden] that starts normal with `std`."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float = 0.02) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the table from the default generator."""
        start_normal(self.weight, self.std)


class ScaledEmbedding(nn.Embedding):
    """An embedding [...] -> [..., hidden], times `scale` as the table's type has it; it shares the
    `table` it is given.
    """

    def __init__(self, table: nn.Parameter, padding_idx: int | None, scale: float) -> None:
        rows, columns = table.shape
        super().__init__(rows, columns, padding_idx, device="meta")
        self.weight = table
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """Token numbers [...] -> vectors [..., D], times the scale."""
        return super().forward(input) * torch.tensor(
            self.scale, dtype=self.weight.dtype, device=self.weight.device
        )


class RMSNorm(nn.Module):
    """x / sqrt(mean of x^2 + eps) times (`offset` + weight), [..., D] -> the same; computed in
    float32 at least.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
    """

    def __init__(self, weight: nn.Parameter, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.offset = offset

    def reset_parameters(self) -> None:
        """Scale by one."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]. Wider inputs stay as wide."""
        wide = x.float() if x.itemsize < 4 else x
        normal = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return normal.to(x.dtype) * (self.weight + self.offset if self.offset else self.weight)


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over the past: [B, H, S, K] x 3 -> [B, H, S, K]; owns no
    parameters.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """q [B, H, S, K], k and v [B, G, S, K] -> [B, H, S, K]. Each of G <= H heads serves a group
        of queries.

        `documents` [B, S]: of a packed sequence, the number of the document of each token; none
        sees another.
        """
        mask = None if documents is None else document_mask(documents)
        dropout = self.dropout if self.training else 0.0
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
        )


def document_mask(documents: Tensor) -> Tensor:
    """[B, S] -> [B, 1, S, S], True where a query (row) sees a key: in its own document, and not
    after it.
    """
    length = documents.shape[1]
    past = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & past)[:, None]


def check_positive(**sizes: int) -> None:
    """Raise `ModelError` for the sizes that are not at least 1."""
    wrong = [f"{name} = {size}" for name, size in sizes.items() if size < 1]
    if wrong:
        raise ModelError(f"{', '.join(wrong)}: must be at least 1")


def check_divides(part: str, part_size: int, whole: str, whole_size: int) -> None:
    """Raise `ModelError` unless `part_size` divides `whole_size`."""
    if whole_size % part_size:
        lower = whole_size - whole_size % part_size
        near = f"{lower} or {lower + part_size}" if lower else f"{part_size}"
        raise ModelError(
            f"{whole} = {whole_size} is not a multiple of {part} = {part_size}; the nearest is "
            f"{near}"
        )
