"""Attention as many write it: sizes come from the input, and one layer makes q, k and v."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH, HEADS = 24, 8, 32, 4
SAMPLES = 32


class Causal(nn.Module):
    """One packed layer, split by the width; heads are viewed by the input's own width."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Masked(nn.Module):
    """Three layers, a mask in a buffer, and scores by hand."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.n_head = HEADS
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        shape = (batch, length, self.n_head, width // self.n_head)
        q, k, v = (
            layer(x).view(*shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = scores.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Patches(nn.Module):
    """Attention of vision transformers: q, k and v in a dimension of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.scale = (WIDTH // HEADS) ** -0.5
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        y = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1) @ v
        return self.proj(torch.reshape(y.transpose(1, 2), (batch, length, width)))


class Transformer(nn.Module):
    """Two blocks of such attention between an embedding and a head."""

    attention: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def block(self) -> nn.Module:
        layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        return Block(self.attention(), nn.Sequential(*layers))

    def forward(self, ids: Tensor) -> Tensor:
        """[samples, positions] -> logits [samples, positions, vocabulary]."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    """A block with norms before its parts."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class OfCausal(Transformer):
    attention = Causal


class OfMasked(Transformer):
    attention = Masked


class OfPatches(Transformer):
    attention = Patches


class Torchs(nn.Module):
    """Torch's attention of positions before, with dropout of its weights and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.drop(self.attn(x, x, x, attn_mask=later, need_weights=False)[0])


class OfTorchs(Transformer):
    attention = Torchs


class Encoded(nn.Module):
    """An encoder and a decoder of torch, time first, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """[samples, positions] -> logits [samples, positions, vocabulary]."""
        x = self.embed(ids).transpose(0, 1)
        later = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
        padding = torch.zeros(ids.shape, dtype=x.dtype).masked_fill(ids == 0, -torch.inf)
        padding[:, 0] = 0.0
        memory = self.encoder(x.flip(0), src_key_padding_mask=padding)
        y = self.decoder(x, memory, tgt_mask=later, tgt_is_causal=True)
        return self.head(y.transpose(0, 1))


class Varied(nn.Module):
    """Torch's attention called in all ways: weights of heads, masks of heads, queries of others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mean = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
        self.each = nn.MultiheadAttention(WIDTH, HEADS)
        self.single = nn.MultiheadAttention(WIDTH, HEADS)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """[samples, positions] -> logits [samples, positions, vocabulary]."""
        x = self.embed(ids)
        seen = ids == 0
        seen[:, 0] = False
        y, weights = self.mean(x, x.roll(1, 1), x.tanh(), key_padding_mask=seen)
        x = x + y + weights @ x
        first = x.transpose(0, 1)
        scores = torch.linspace(-1, 1, len(ids) * HEADS * x.shape[1] ** 2, dtype=x.dtype)
        of_heads = scores.view(-1, x.shape[1], x.shape[1])
        y, weights = self.each(first, first, first, attn_mask=of_heads, average_attn_weights=False)
        x = x + y.transpose(0, 1) + (weights[:, 1] - weights[:, -1]) @ x
        x = x + torch.stack([self.single(one, one, one)[0] for one in x])
        return self.head(x)


class Modes(Masked):
    """Heads are views of other numbers in training than in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        size = width // self.n_head
        made = [layer(x) for layer in (self.query, self.key, self.value)]
        if self.training:
            heads = [one.view(batch, length, size, self.n_head).permute(0, 3, 1, 2) for one in made]
            y = F.scaled_dot_product_attention(*heads, is_causal=True).permute(0, 2, 3, 1)
        else:
            heads = [one.view(batch, length, self.n_head, size).transpose(1, 2) for one in made]
            y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        return self.proj(y.reshape(batch, length, width))


class OfModes(Transformer):
    attention = Modes


class Again(Masked):
    """A function within the forward is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class OfAgain(Transformer):
    attention = Again


class LearnedMasks(nn.Module):
    """Torch's attention with masks that are learned, and one whose weight another layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.one, self.two = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in "ab")
        self.tied = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.packed.weight = self.tied.in_proj_weight
        self.by_position = nn.Parameter(torch.randn(LENGTH, LENGTH))
        self.by_head = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.by_key, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """[samples, positions] -> logits [samples, positions, vocabulary]."""
        x = self.embed(ids)
        keys = self.by_key(x).squeeze(-1)
        x = x + self.one(x, x, x, attn_mask=self.by_position, key_padding_mask=keys)[0]
        of_heads = self.by_head.repeat(len(ids), 1, 1)
        x = x + self.two(x, x, x, attn_mask=of_heads, need_weights=False)[0]
        return self.head(x + self.tied(x, x, x)[0] + self.packed(x)[..., :WIDTH])


def lines() -> list[tuple[Tensor, Tensor]]:
    """Samples of tokens and of those that follow them."""
    shape = (SAMPLES, LENGTH + 1)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(3))
    return [(line[:-1], line[1:]) for line in ids]


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over all positions."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def config(kind: type[nn.Module]) -> dict[str, Any]:
    """The config of one of the models."""
    return {
        "model": {"python": f"{__name__}:{kind.__name__}"},
        "data": {"python": f"{__name__}:lines"},
        "train": {
            "global_batch": 8,
            "optimizer": "sgd",
            "lr": 0.1,
            "loss": f"{__name__}:token_loss",
        },
        "plan": {"text": "dp1"},
    }
