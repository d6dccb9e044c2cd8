"""Modules, data and losses as somebody writes them who has not read this project's documents."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH = 23, 8, 16


class Block(nn.Module):
    """Attention over earlier positions, and a layer whose weight is made of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (2, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """Takes a mapping by name and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, weight: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) * weight[..., None]
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


def samples() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Samples of mappings, inputs and targets."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (48, LENGTH + 1), generator=generator)
    weight = torch.rand(48, LENGTH, generator=generator)
    return [
        ({"ids": line[:-1], "weight": share}, {"labels": line[1:]})
        for line, share in zip(ids, weight, strict=True)
    ]


def mean_loss(output: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """One number, the mean over all positions."""
    return F.cross_entropy(output["logits"].flatten(0, 1), targets["labels"].flatten())


def config(**train: Any) -> dict[str, Any]:
    """The config of `Language`."""
    here = __name__
    keys = {"global_batch": 12, "optimizer": "adamw", "lr": 1e-2, "loss": f"{here}:mean_loss"}
    return {
        "model": {"python": f"{here}:Language"},
        "data": {"python": f"{here}:samples"},
        "train": {**keys, **train},
        "plan": {"text": "dp1"},
    }
