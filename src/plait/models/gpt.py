"""GPT-2: a decoder with learned positions, layer norms before each part, and a GELU MLP.

Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.3. The four
projections of attention are separate, and heads are counted from the tensors at hand. So a shard of
the heads runs through the same code. Shapes: B samples, S positions, D hidden size, H heads, K head
size, V vocabulary.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.layers import CausalAttention, Embedding, Linear, check_divides, check_positive

BLOCKS = "blocks.*"
CHAIN = ("embed", "position", "dropout", BLOCKS, "norm", "head")
ROLES = {
    "embed": "embedding",
    "position": "position",
    "blocks.*.norm1": "norm",
    "blocks.*.attention.q": "column",
    "blocks.*.attention.k": "column",
    "blocks.*.attention.v": "column",
    "blocks.*.attention.core": "attention",
    "blocks.*.attention.o": "row",
    "blocks.*.norm2": "norm",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "norm": "norm",
    "head": "head",
}


class Positions(Embedding):
    """Adds a learned vector to each position: [B, S, D] -> [B, S, D]."""

    def forward(self, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]. `positions` [S] are the places of this slice in the whole
        sequence; by default 0 .. S-1. Those of packed documents are [B, S].

        Raises:
            ModelError: without `positions`, more of them than the table has.
        """
        length = hidden.shape[1]
        if positions is not None:
            return hidden + F.embedding(positions, self.weight)
        if length > self.num_embeddings:
            raise ModelError(
                f"a sequence of {length} tokens exceeds max_position_embeddings = "
                f"{self.num_embeddings}"
            )
        return hidden + self.weight[:length]


class GPTAttention(nn.Module):
    """Multi-head causal self-attention, [B, S, D] -> [B, S, D]."""

    def __init__(
        self, hidden_size: int, num_heads: int, *, dropout: float, std: float, std_residual: float
    ) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.q = Linear(hidden_size, hidden_size, std=std)
        self.k = Linear(hidden_size, hidden_size, std=std)
        self.v = Linear(hidden_size, hidden_size, std=std)
        self.core = CausalAttention(dropout)
        self.o = Linear(hidden_size, hidden_size, std=std_residual)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]. Project, attend by head, project back; `documents` [B, S] as in
        `GPT`.
        """
        q, k, v = (self.split_heads(projection(x)) for projection in (self.q, self.k, self.v))
        inputs = (q, k, v) if documents is None else (q, k, v, documents)
        return self.o(self.core(*inputs).transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, S, H K] -> [B, H, S, K], for as many heads as there are."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class GPTMLP(nn.Module):
    """GELU between two linear layers, [B, S, D] -> [B, S, D]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, std: float, std_residual: float
    ) -> None:
        super().__init__()
        self.up = Linear(hidden_size, intermediate_size, std=std)
        self.down = Linear(intermediate_size, hidden_size, std=std_residual)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D], by the tanh form of GELU, as GPT-2 was trained with."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GPTBlock(nn.Module):
    """Attention, then the MLP, each behind its norm and added to the residual stream."""

    def __init__(
        self, attention: GPTAttention, mlp: GPTMLP, hidden_size: int, *, eps: float, dropout: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, eps=eps)
        self.attention = attention
        self.norm2 = nn.LayerNorm(hidden_size, eps=eps)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]; `documents` [B, S] as in `GPT`."""
        x = x + self.dropout(self.attention(self.norm1(x), documents))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Token numbers [B, S] -> logits [B, S, V]: the composition of `CHAIN`, one tensor between any
    two links.
    """

    def __init__(
        self,
        *,
        num_hidden_layers: int,
        hidden_size: int,
        num_attention_heads: int,
        vocab_size: int,
        intermediate_size: int | None = None,
        max_position_embeddings: int = 1024,
        tie_word_embeddings: bool = False,
        layer_norm_epsilon: float = 1e-5,
        dropout: float = 0.0,
        initializer_range: float = 0.02,
    ) -> None:
        """Make the modules; sizes are in elements, and names those of GPT-2 on Hugging Face or its
        kin.

        Args:
            num_hidden_layers: the number of blocks.
            hidden_size: D.
            num_attention_heads: H, which divides D.
            vocab_size: V.
            intermediate_size: of the MLP; 4 D by default.
            max_position_embeddings: the longest S.
            tie_word_embeddings: the head's weight [V, D] is the embedding's.
            layer_norm_epsilon: added to the variance.
            dropout: the rate, in attention and behind each part.
            initializer_range: the standard deviation of the first weights.

        Raises:
            ModelError: a size below 1, or heads that do not divide D.
        """
        check_positive(
            num_hidden_layers=num_hidden_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
        )
        check_positive(vocab_size=vocab_size, max_position_embeddings=max_position_embeddings)
        check_divides("num_attention_heads", num_attention_heads, "hidden_size", hidden_size)
        super().__init__()
        intermediate_size = intermediate_size or 4 * hidden_size
        std = initializer_range
        std_residual = std / math.sqrt(
            2 * num_hidden_layers
        )  # each block adds two parts to the residual stream

        def block() -> GPTBlock:
            attention = GPTAttention(
                hidden_size,
                num_attention_heads,
                dropout=dropout,
                std=std,
                std_residual=std_residual,
            )
            mlp = GPTMLP(hidden_size, intermediate_size, std=std, std_residual=std_residual)
            return GPTBlock(attention, mlp, hidden_size, eps=layer_norm_epsilon, dropout=dropout)

        self.embed = Embedding(vocab_size, hidden_size, std=std)
        self.position = Positions(max_position_embeddings, hidden_size, std=std)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(block() for _ in range(num_hidden_layers))
        self.norm = nn.LayerNorm(hidden_size, eps=layer_norm_epsilon)
        self.head = Linear(hidden_size, vocab_size, bias=False, std=std)
        if tie_word_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Token numbers [B, S] -> logits [B, S, V].

        `documents` [B, S]: of packed sequences, the number of the document of each token; none sees
        another. `positions` [B, S]: the place of each token in its document.
        """
        places = {} if positions is None else {"positions": positions}
        x = self.dropout(self.position(self.embed(input_ids), **places))
        for block in self.blocks:
            x = block(x) if documents is None else block(x, documents)
        return self.head(self.norm(x))
