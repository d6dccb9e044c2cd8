"""A model with everything that a composition of strategies may trip over, and that real models
have.

A weight used twice in one block, one module called after every block and tied to another, a buffer
that takes part, parameters that no forward uses. It is no chain, so a pipeline must find its flow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = "blocks.*"
ROLES = {
    "embed": "replicated",
    "shared": "replicated",
    "last": "replicated",
    "blocks.*.norm": "norm",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "blocks.*.twice": "replicated",
    "idle": "replicated",
    "head": "replicated",
}


class Block(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)
        self.twice = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(torch.tanh(self.twice(x)))
        return x + self.down(F.gelu(self.up(self.norm(y))))


class Odd(nn.Module):
    """[B, in_features] -> [B, out_features]."""

    factor: Tensor

    def __init__(
        self,
        *,
        in_features: int,
        hidden_size: int,
        intermediate_size: int,
        out_features: int,
        num_hidden_layers: int,
        tied: bool,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(in_features, hidden_size, bias=False)
        self.blocks = nn.ModuleList(
            Block(hidden_size, intermediate_size) for _ in range(num_hidden_layers)
        )
        self.shared = nn.Linear(hidden_size, hidden_size)
        self.last = nn.Linear(hidden_size, hidden_size)
        if tied:
            self.last.weight = self.shared.weight
        self.head = nn.Linear(hidden_size, out_features, bias=False)
        self.idle = nn.Linear(3, 2)
        self.register_buffer("factor", torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.factor.copy_(torch.linspace(0.5, 1.5, self.factor.numel()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.shared(block(x)) * self.factor
        return self.head(torch.tanh(self.last(x)))
