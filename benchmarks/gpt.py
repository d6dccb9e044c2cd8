"""The GPT that benchmarks of strategies train: heads of 64 features, equal initial values, random
tokens, fused AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait import models


@dataclass(frozen=True)
class Case:
    """A model and a global batch; `why` says what the case is about."""

    name: str
    why: str
    num_hidden_layers: int
    hidden_size: int
    seq_len: int
    global_batch: int
    vocab_size: int = 1024

    def model(self, device: str = "cpu") -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return models.make(
                "gpt",
                num_hidden_layers=self.num_hidden_layers,
                hidden_size=self.hidden_size,
                num_attention_heads=self.hidden_size // 64,
                vocab_size=self.vocab_size,
                max_position_embeddings=self.seq_len,
            )

    def batch(self, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of one of `size` ranks, each [global batch / size, S]."""
        generator = torch.Generator().manual_seed(1 + rank)
        tokens = torch.randint(
            0, self.vocab_size, (self.global_batch // size, self.seq_len + 1), generator=generator
        )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)
